"""torch's styles read as layouts, and style strings as torch styles."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import translate_jobs
from pool import Pool
from shardplan import PlanError, translate_parallel_style
from shardplan.from_python import plan_from_dict
from shardplan.layouts import parse_conversion
from shardplan.styles import STYLES
from shardplan.translate import Reading, read_parallel_style


def reading(style: str | None, taken: str = "", given: str = "") -> Reading:
    ends = [parse_conversion(text) if text else None for text in (taken, given)]
    return Reading(style, *ends)


@pytest.mark.parametrize(
    ("stock", "expected"),
    [
        (ColwiseParallel(), reading("colwise")),
        (ColwiseParallel(output_layouts=Replicate()), reading("colwise", "", "shard(-1) -> replicate")),
        (ColwiseParallel(input_layouts=Shard(1)), reading("colwise", "stream -> replicate")),
        (ColwiseParallel(input_layouts=Shard(-1)), reading("colwise", "shard(-1) -> replicate")),
        (RowwiseParallel(), reading("rowwise", "", "partial -> replicate")),
        (RowwiseParallel(output_layouts=Shard(1)), reading("rowwise", "", "partial -> stream")),
        (RowwiseParallel(output_layouts=Partial()), reading("rowwise", "", "partial")),
        (
            RowwiseParallel(input_layouts=Replicate()),
            reading("rowwise", "replicate -> shard(-1)", "partial -> replicate"),
        ),
        (SequenceParallel(), reading("sequence_parallel")),
        (
            PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            reading("block", "stream -> replicate"),
        ),
        (
            PrepareModuleInput(input_kwarg_layouts={"x": Replicate()}, desired_input_kwarg_layouts={"x": Shard(1)}),
            reading(None, "replicate -> stream"),
        ),
        (
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
            reading(None, "", "stream -> replicate"),
        ),
        (
            PrepareModuleInputOutput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
                output_layouts=Partial(),
                desired_output_layouts=Shard(1),
            ),
            reading("block", "stream -> replicate", "partial -> stream"),
        ),
        (SequenceParallel(sequence_dim=2), None),
    ],
)
def test_stock_styles_are_read_as_layouts(stock: ParallelStyle, expected: Reading | None) -> None:
    assert read_parallel_style(stock) == expected


def test_a_subclass_is_not_read() -> None:
    class Mine(ColwiseParallel):
        pass

    assert read_parallel_style(Mine()) is None


def test_edges_settle_where_a_plan_file_has_them() -> None:
    plan = plan_from_dict(
        {
            "layers.*.attn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "layers.*.attn.wo": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    )
    edges = {rule.pattern.text: (str(rule.input), str(rule.output)) for rule in plan.rules}
    assert edges == {
        "layers.*.attn": ("stream -> replicate", "partial -> stream"),
        "layers.*.attn.wo": ("None", "None"),
        "norm": ("None", "stream -> replicate"),
        "output": ("None", "shard(-1) -> replicate"),
    }
    assert plan.sequence_parallel is True


@pytest.mark.parametrize("style", STYLES)
def test_every_style_string_translates(style: str) -> None:
    assert isinstance(translate_parallel_style(style), ParallelStyle)


def test_an_unknown_string_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"unknown style 'colwize'[\s\S]*did you mean colwise"):
        translate_parallel_style("colwize")


@pytest.mark.parametrize(
    "styles",
    [
        {"up": "colwise", "down": "rowwise"},
        {"up": "colwise_rep", "down": "rowwise_rep"},
        {"up": "colwise_gather_output"},
        {"down": "rowwise_split_input"},
        {"embed": "embedding_rowwise", "norm": "replicate"},
        {"embed": "embedding_colwise", "up": "colwise", "down": "rowwise"},
    ],
    ids=str,
)
def test_by_parallelize_module(pool: Pool, styles: dict[str, str]) -> None:
    assert pool.run(2, translate_jobs.translated, styles) == [[], []]


def test_sequence_parallel_stands_alone(pool: Pool) -> None:
    assert pool.run(2, translate_jobs.sequence_parallel_norm) == [[], []]
