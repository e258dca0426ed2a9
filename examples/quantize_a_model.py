"""A language model at 2.5 bits per weight, in ten lines: what was chosen, what it costs, and text from it.

Run: python examples/quantize_a_model.py
"""

import rco

result = rco.quantize("tiny-llama", bits=2.5)
print(result)
print(result.allocation)

prompt = result.tokenizer("The old man looked at", return_tensors="pt")
tokens = result.model.float().generate(**prompt, max_new_tokens=30, do_sample=False)
print(result.tokenizer.decode(tokens[0], skip_special_tokens=True))
