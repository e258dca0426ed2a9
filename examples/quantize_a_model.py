"""Quantize a language model to 2.5 bits per weight; print its quality, the width of each layer, and some text.

Run: python examples/quantize_a_model.py
"""

import rco

result = rco.quantize("tiny-llama", bits=2.5)
print(result)  # KL and perplexity beside simple allocations
print(result.allocation)  # heat map: bits by kind of layer and depth

prompt = result.tokenizer("The old man looked at", return_tensors="pt")
tokens = result.model.float().generate(**prompt, max_new_tokens=30, do_sample=False)
print(result.tokenizer.decode(tokens[0], skip_special_tokens=True))
