"""A byte-level tokenizer of any size from 259 tokens on, for models without one: random ones, tests."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any, Final

from vime_core.data.optional import require

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES: Final = 256
LEAST: Final = BYTES + len(SPECIAL_TOKENS)
MOST: Final = LEAST + len(string.ascii_lowercase) ** 2
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_byte_tokenizer(directory: Path, vocabulary: int, context: int) -> None:
    """Byte-level BPE: special tokens, the bytes, then pairs of letters until the vocabulary is full.

    Args:
        directory: of the model; it exists.
        vocabulary: `LEAST` to `MOST` tokens; a model may have more.
        context: most positions of the model.
    """
    tokenizers, transformers = require("tokenizers"), require("transformers")
    letters = string.ascii_lowercase
    merges = list(itertools.islice(((first, second) for first in letters for second in letters), vocabulary - LEAST))
    alphabet: Any = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    symbols = [*SPECIAL_TOKENS, *sorted(alphabet), *map("".join, merges)]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=[SPECIAL_TOKENS[1]],
        model_max_length=context,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
