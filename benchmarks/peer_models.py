"""transformers' torch model over the weights of a loaded one, for comparisons (extra: torch)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_jax import MedusaLM


def torch_model(lm: MedusaLM) -> Any:
    """The same float32 weights, on as many threads as there are cores."""
    import torch  # pyright: ignore[reportMissingImports] - an extra
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        lm.save_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def torch_generate(
    model: Any, lm: MedusaLM, ids: Sequence[int], new_tokens: int, **options: Any
) -> list[int]:
    """What transformers' greedy `generate` adds to a prompt; options go to it."""
    import torch  # pyright: ignore[reportMissingImports] - an extra

    prompt = torch.tensor([list(ids)])
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=list(lm.end_tokens),
            pad_token_id=lm.end_tokens[0],
            **options,
        )
    return out[0, len(ids) :].tolist()
