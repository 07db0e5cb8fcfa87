"""docs/speed.md and its picture, out of what speed.py and costs.py recorded.

python tests/benchmarks/page.py SPEED.jsonl COSTS.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
import transformers
from costs import Cost
from picture import draw
from speed import AGAIN, Result, table

DOCS = Path(__file__).parents[2] / "docs"
PAGE = """# Speed

<!-- written by tests/benchmarks/page.py: make bench -->

Forward and backward of a Llama of four layers in fp32 on two ranks, gloo, one core each; torch {torch}, transformers
{transformers}. *The floor* is Megatron-style collectives written by hand on plain tensors
([floor.py](../tests/benchmarks/floor.py)); *per-linear* is `parallelize_module` with a style for each linear;
*transformers* is its own `from_pretrained(..., distributed_config=...)`, which has neither sequence parallelism nor
FSDP2. All of them compute the same gradients, which is a test, as are the collectives (`tests/test_benchmarks.py`).

Contestants take turns on the same weights and batch; a ratio is the median over rounds of seconds over the floor's in
the same round, with its quartiles. *floor again* is the floor against itself: by the median of its quartiles' distance
a ratio may be off by {noise:.0%} either way in a single round.

![Seconds over the floor's](speed.svg)

## On a mesh of tp alone

{alone}

## With FSDP2 on every contestant

With a cut stream FSDP2's units each sum the gradients of their norms over tp as they are reduced; the floor does it
once, after the backward.

{with_fsdp2}

## Beside a step

Seconds are CPU seconds; "405B" is Llama 3.1 405B on dp=1024,tp=8. Memory is the most private memory of a process above
what it had before.

{costs}
"""


def main() -> None:
    speed, costs = (Path(argument).read_text(encoding="utf-8").splitlines() for argument in sys.argv[1:3])
    results = [Result(**json.loads(line)) for line in speed]
    draw([result for result in results if result.contestant != "floor"], DOCS / "speed.svg")
    page = PAGE.format(
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        noise=median((result.high - result.low) / 2 for result in results if result.contestant == AGAIN),
        alone=table(results, fsdp2=False),
        with_fsdp2=table(results, fsdp2=True),
        costs="\n".join(_costs([Cost(**json.loads(line)) for line in costs])),
    )
    (DOCS / "speed.md").write_text(page, encoding="utf-8")


def _costs(costs: list[Cost]) -> Iterator[str]:
    yield "| what | measured | budget |"
    yield "| --- | --- | --- |"
    for cost in costs:
        yield f"| {cost.what} | {cost.measured:.3g} {cost.unit} | {cost.budget:g} |"


if __name__ == "__main__":
    main()
