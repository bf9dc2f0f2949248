# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tokenizer for the tiny models: every text encodes, and every id decodes.

Ids 0 and 1 are special, the next 256 are the bytes, and the rest pairs of letters.
"""

import itertools
import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<s>", "</s>"
# As the byte-level alphabet writes a space.
_SPACE = "Ġ"
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly ``vocab_size`` tokens.

    Raises:
        ValueError: ``vocab_size`` is too small for the bytes, or larger than the
            pairs of letters fill.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase + _SPACE + "I"
    pairs = list(itertools.product(letters, repeat=2))
    smallest = 2 + len(alphabet)
    if not smallest <= vocab_size <= smallest + len(pairs):
        raise ValueError(
            f"vocab_size must be from {smallest} to {smallest + len(pairs)}, "
            f"got {vocab_size}."
        )
    merges = pairs[: vocab_size - smallest]
    tokens = [BOS, EOS, *alphabet, *map("".join, merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the files that transformers and vLLM read a tokenizer from."""
    make_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
