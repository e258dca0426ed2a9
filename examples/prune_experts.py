"""A mixture of experts without a quarter of its experts, from a model that is in memory already.

Run: python examples/prune_experts.py
"""

import rco

loaded = rco.load("tiny-moe", dtype="float32")  # any transformers model and its tokenizer
model, tokenizer = loaded.model, loaded.tokenizer
result = rco.prune(model, tokenizer, experts=0.25)
print(result.allocation)

for name, one in (("full", model), ("pruned", result.model)):
    size = sum(parameter.numel() for parameter in one.parameters())
    tokens = one.generate(
        **tokenizer("def add(a, b):", return_tensors="pt"), max_new_tokens=20, do_sample=False
    )
    print(f"{name}: {size:,} parameters\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}")
