"""What transformers generates for each prompt alone, and a comparison that excuses nothing but ties."""

import torch
from transformers import AutoModelForCausalLM

# Two logits closer than this may come out in either order.
TIE = 1e-4


class TransformersOracle:
    """Greedy generation in float32, one prompt at a time."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, prompt, max_tokens):
        """The new token ids after the ids of `prompt`."""
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def gap(self, tokens, first, second):
        """How far apart the logits of two tokens are after `tokens`, and how far below the best one they are."""
        logits = self.model(torch.tensor([tokens])).logits[0, -1]
        return float(logits.max() - torch.minimum(logits[first], logits[second]))

    def assert_same(self, prompt, expected, actual):
        """Fail unless the sequences are equal up to a tie; returns whether there was one."""
        for i, (e, a) in enumerate(zip(expected, actual, strict=False)):
            if e != a:
                gap = self.gap([*prompt, *expected[:i]], e, a)
                assert gap <= TIE, f"token {i} is {a}, not {e}, and their logits are {gap:.2g} apart"
                return True
        assert len(expected) == len(actual)
        return False
