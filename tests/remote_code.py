"""Nemotron-H as the code in its checkpoints on the hub has it: ``backbone`` where transformers says ``model``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import NemotronHConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHModel, NemotronHPreTrainedModel


class NemotronHForCausalLM(NemotronHPreTrainedModel):
    """Its children are ``backbone``, with ``embeddings``, ``layers`` and ``norm_f``, and ``lm_head``."""

    base_model_prefix = "backbone"

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__(config)
        self.backbone = NemotronHModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        outputs = self.backbone(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        # The code on the hub reads the dtype of the head's weight; transformers' own does not.
        logits = self.lm_head(outputs[0].to(self.lm_head.weight.dtype)).float()
        loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)
