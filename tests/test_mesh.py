from __future__ import annotations

import pytest

from shardplan.diagnostics import PlanError
from shardplan.mesh import MeshSpec, mesh_spec, parse_mesh

ALLOWED = "axes among tp, one of dp, fsdp, dp_shard, beside it dp_replicate and cp"


def refusals(text: str) -> list[tuple[str, str]]:
    with pytest.raises(PlanError) as error:
        parse_mesh(text)
    assert {d.code for d in error.value.diagnostics} == {"SP301"}
    assert {d.expected for d in error.value.diagnostics} == {ALLOWED}
    return [(d.message, d.hint) for d in error.value.diagnostics]


@pytest.mark.parametrize("dp", ["dp", "fsdp", "dp_shard"])
def test_the_usual_mesh(dp: str) -> None:
    mesh = parse_mesh(f"{dp}=2, tp=4")
    assert mesh == MeshSpec(((dp, 2), ("tp", 4)))
    assert (mesh.size, mesh.tp, mesh.has_tp, mesh.has_dp) == (8, 4, True, True)
    assert (mesh.shard_axes, mesh.replicate_axis) == ((dp,), None)
    assert str(mesh) == f"{dp}=2,tp=4"


def test_tensor_parallel_alone_has_no_dp() -> None:
    mesh = parse_mesh("tp=2")
    assert (mesh.has_dp, mesh.shard_axes, mesh.tp) == (False, (), 2)


def test_a_dp_axis_of_size_one_counts_and_a_tp_axis_of_size_one_does_not() -> None:
    mesh = parse_mesh("dp=1,tp=1")
    assert (mesh.has_dp, mesh.shard_axes) == (True, ("dp",))
    assert (mesh.has_tp, mesh.tp) == (False, 1)


def test_hsdp_replicates_over_one_axis_and_shards_over_the_other() -> None:
    mesh = parse_mesh("dp_replicate=2,dp_shard=4,tp=2")
    assert (mesh.replicate_axis, mesh.shard_axes, mesh.size) == ("dp_replicate", ("dp_shard",), 16)
    assert parse_mesh("dp_replicate=1,dp=4").replicate_axis is None


def test_cp_is_flattened_into_the_sharding_axes() -> None:
    assert parse_mesh("dp_shard=2,cp=2,tp=2").shard_axes == ("dp_shard", "cp")
    assert parse_mesh("dp_shard=2,cp=1,tp=2").shard_axes == ("dp_shard",)


def test_other_axes_of_size_one_are_ignored() -> None:
    mesh = parse_mesh("pp=1,ep=1,dp=2,tp=2")
    assert (mesh.shard_axes, mesh.tp, mesh.size) == (("dp",), 2, 4)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "'' in mesh '' is not an axis and its size", "write it as dp=2,tp=4"),
        ("dp", "'dp' in mesh 'dp' is not an axis and its size", "write it as dp=2,tp=4"),
        ("dp=2 tp=4", "'dp=2 tp=4' in mesh 'dp=2 tp=4' is not an axis and its size", "write it as dp=2,tp=4"),
        ("dp=2.0", "'dp=2.0' in mesh 'dp=2.0' is not an axis and its size", "write it as dp=2,tp=4"),
        ("dp=2,dp=2", "axis 'dp' is given twice in mesh 'dp=2,dp=2'", "give each axis once"),
        ("tp=0", "axis 'tp' has size 0 in mesh 'tp=0'", "every axis has at least one rank"),
        ("tp=-2", "axis 'tp' has size -2 in mesh 'tp=-2'", "every axis has at least one rank"),
        (
            "ep=2,tp=2",
            "axis 'ep' of size 2 in mesh 'ep=2,tp=2' is not one that a plan uses",
            "pass the submesh without it: mesh['dp', 'tp']",
        ),
        (
            "pp=2,tp=2",
            "axis 'pp' of size 2 in mesh 'pp=2,tp=2' is not one that a plan uses",
            "split the model into stages first and apply the plan to each with its mesh without pp",
        ),
        (
            "dp=2,fsdp=2",
            "mesh 'dp=2,fsdp=2' has dp and fsdp, which are names for the same axis",
            "keep one; replicas of it go on dp_replicate",
        ),
        ("cp=2,tp=2", "mesh 'cp=2,tp=2' has cp but no dp axis to flatten it into", "add dp=1"),
        (
            "dp_replicate=4,tp=2",
            "mesh 'dp_replicate=4,tp=2' has dp_replicate but no dp axis: FSDP2 replicates only what it also shards",
            "add dp=1 to keep whole replicas, or name the axis dp to shard over 4 ranks",
        ),
        ("pp=1", "mesh 'pp=1' has neither a tp nor a dp axis: nothing to shard over", "name the axes tp and dp"),
    ],
)
def test_meshes_that_cannot_be_used(text: str, message: str, hint: str) -> None:
    assert refusals(text) == [(message, hint)]


def test_every_problem_is_reported() -> None:
    assert len(refusals("ep=2,pp=2,tp=0")) == 3


def test_a_device_mesh_is_read_by_its_names() -> None:
    assert mesh_spec(("dp", "tp"), (2, 4)) == parse_mesh("dp=2,tp=4")
    with pytest.raises(PlanError, match="axis 'data' of size 2 in mesh 'data=2,tp=4' is not one that a plan uses"):
        mesh_spec(("data", "tp"), (2, 4))


def test_an_unnamed_mesh_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        mesh_spec(None, (2, 4))
    (finding,) = error.value.diagnostics
    assert finding.message == "the mesh of shape (2, 4) has no axis names"
    assert finding.hint == "pass mesh_dim_names=('dp', 'tp') to init_device_mesh"
