"""Sharding plans for PyTorch language models: YAML in, a proven tensor-parallel and FSDP2 model out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardplan.api import apply_plan as apply_plan
    from shardplan.api import check_plan as check_plan
    from shardplan.api import compile_plan as compile_plan
    from shardplan.api import gathered_logits as gathered_logits
    from shardplan.api import verify_plan as verify_plan
    from shardplan.batches import data_parallel_rank_and_size as data_parallel_rank_and_size
    from shardplan.batches import require_same_batch as require_same_batch
    from shardplan.checkpoint.load import load_weights as load_weights
    from shardplan.checkpoint.resume import Resumed as Resumed
    from shardplan.checkpoint.resume import latest_checkpoint as latest_checkpoint
    from shardplan.checkpoint.resume import load_checkpoint as load_checkpoint
    from shardplan.checkpoint.save import save_weights as save_weights
    from shardplan.checkpoint.store import Saving as Saving
    from shardplan.checkpoint.store import save_checkpoint as save_checkpoint
    from shardplan.checkpoint.together import CheckpointError as CheckpointError
    from shardplan.diagnostics import Diagnostic as Diagnostic
    from shardplan.diagnostics import PlanError as PlanError
    from shardplan.gradients import clip_grad_by_total_norm_ as clip_grad_by_total_norm_
    from shardplan.gradients import get_grad_norm as get_grad_norm
    from shardplan.gradients import to_local_if_dtensor as to_local_if_dtensor
    from shardplan.hf.collect import get_hf_tp_plan as get_hf_tp_plan
    from shardplan.load import load_plan as load_plan
    from shardplan.loss import cross_entropy as cross_entropy
    from shardplan.loss import log_probs as log_probs
    from shardplan.parallel.standalone import translate_parallel_style as translate_parallel_style
    from shardplan.plan import MixedPrecision as MixedPrecision
    from shardplan.plan import Plan as Plan
    from shardplan.styles import Style as Style
    from shardplan.weights import hf_state_dict as hf_state_dict
    from shardplan.weights import load_hf_state_dict as load_hf_state_dict

__version__ = "0.1.0"

# Imported when first asked for: reading a plan needs no torch.
_HOMES = {
    "apply_plan": "api",
    "check_plan": "api",
    "compile_plan": "api",
    "gathered_logits": "api",
    "verify_plan": "api",
    "data_parallel_rank_and_size": "batches",
    "require_same_batch": "batches",
    "load_weights": "checkpoint.load",
    "Resumed": "checkpoint.resume",
    "Saving": "checkpoint.store",
    "latest_checkpoint": "checkpoint.resume",
    "load_checkpoint": "checkpoint.resume",
    "save_checkpoint": "checkpoint.store",
    "save_weights": "checkpoint.save",
    "CheckpointError": "checkpoint.together",
    "Diagnostic": "diagnostics",
    "PlanError": "diagnostics",
    "clip_grad_by_total_norm_": "gradients",
    "get_grad_norm": "gradients",
    "to_local_if_dtensor": "gradients",
    "get_hf_tp_plan": "hf.collect",
    "load_plan": "load",
    "cross_entropy": "loss",
    "log_probs": "loss",
    "MixedPrecision": "plan",
    "Plan": "plan",
    "Style": "styles",
    "hf_state_dict": "weights",
    "load_hf_state_dict": "weights",
    "translate_parallel_style": "parallel.standalone",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardplan' has no attribute '{name}'")
    return getattr(import_module(f"shardplan.{_HOMES[name]}"), name)
