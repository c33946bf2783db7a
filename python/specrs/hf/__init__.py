"""Generates with specrs, for users of transformers, from a model that transformers has loaded.

    outputs = model.generate(**inputs, max_new_tokens=64, custom_generate=specrs.hf.generate)
    llm = specrs.hf.from_model(model, tokenizer)

Needs transformers 5 where it is called, and imports it nowhere else.
"""

from specrs.hf.errors import UnsupportedGenerationError
from specrs.hf.generation import generate
from specrs.hf.module import from_model

__all__ = ["UnsupportedGenerationError", "from_model", "generate"]
