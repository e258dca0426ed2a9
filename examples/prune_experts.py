"""Prune a quarter of the experts of a mixture-of-experts model that is already loaded.

Run: python examples/prune_experts.py
"""

import rco

loaded = rco.load("tiny-moe", dtype="float32")  # any transformers model and its tokenizer
model, tokenizer = loaded.model, loaded.tokenizer
result = rco.prune(model, tokenizer, experts=0.25)
print(result.allocation)  # heat map: which experts of each layer are kept

# The loaded model is unchanged; result.model is the pruned copy.
for name, one in (("full", model), ("pruned", result.model)):
    size = sum(parameter.numel() for parameter in one.parameters())
    tokens = one.generate(
        **tokenizer("def add(a, b):", return_tensors="pt"), max_new_tokens=20, do_sample=False
    )
    print(f"{name}: {size:,} parameters\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}")
