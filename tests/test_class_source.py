"""What is read from the source of classes."""

from __future__ import annotations

from torch import Tensor, nn

from shardplan.class_source import interleaves, methods_reading, reads_children, splits_by, used_by_methods


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter()
        self.proj = nn.Linear(2, 2)
        self.width = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.correct(x) * self.scale

    def correct(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.proj.weight)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def plain(self, x: Tensor) -> Tensor:
        first, _ = x.split(self.width, dim=-1)
        return first

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)


class Heads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, 3, self.head_dim)


def test_methods_that_compute_with_weights_are_found_and_those_that_set_them_are_not() -> None:
    assert methods_reading(Mixer, ("scale",)) == ("correct", "scaled")
    assert methods_reading(Mixer, ()) == ("correct",)
    assert methods_reading(nn.Linear, ("weight",)) == ()


def test_what_methods_use() -> None:
    assert used_by_methods(Mixer) >= {"scale", "proj", "width"}
    assert splits_by(Mixer) == {"width"}
    assert reads_children(Mixer)
    assert not reads_children(Heads)
    assert (interleaves(Heads), interleaves(Mixer)) == (True, False)
