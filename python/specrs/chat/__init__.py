"""Makes a conversation into the text that a chat model continues, by the template that comes with the model.

    templates = ChatTemplates.of(directory)
    text = templates.render([{"role": "user", "content": "hello"}])

A template is a program in Jinja. It runs in jinja2's sandbox, in the dialect that transformers gives it
(https://huggingface.co/docs/transformers/chat_templating): blocks trimmed, `break` and `continue`, the tag
`{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that leaves HTML alone. The text is that of
`apply_chat_template`. A model without a template is an error: nothing guesses how it reads a conversation.

Neither torch nor transformers is needed. jinja2 is imported with the first template.
"""

from __future__ import annotations

from specrs.chat.apart import apart
from specrs.chat.errors import ChatLimitError, ChatTemplateError, RenderLimits
from specrs.chat.files import TOKENIZER_CONFIG
from specrs.chat.messages import conversations
from specrs.chat.templates import ChatTemplates, Messages

__all__ = [
    "TOKENIZER_CONFIG",
    "ChatLimitError",
    "ChatTemplateError",
    "ChatTemplates",
    "Messages",
    "RenderLimits",
    "apart",
    "conversations",
]
