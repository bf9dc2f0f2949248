# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tiny models' tokenizer, as transformers and vLLM read it."""

import pytest
from transformers import AutoTokenizer

from vllm.tokenizers.deepseek_v32 import DeepseekV32Tokenizer
from vllm_sparse_mla.testing.tiny_tokenizer import make_tokenizer, write_tokenizer

TEXT = "The quick brown fox, 42 wörds\n\tand 狐.\n"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 1024)
    return folder


def test_texts_and_ids_round_trip(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 1024
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    ids = tokenizer(TEXT).input_ids
    assert tokenizer.decode(ids) == TEXT
    # Pairs of letters are one token.
    assert len(ids) < len(TEXT.encode())
    assert all(tokenizer.decode([index]) for index in range(1024))


def test_chat_template(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert text == "<s>[user] hi\n[assistant] "


def test_vllm_chats_in_deepseeks_own_format(folder):
    """For DeepSeek-V3.2 vLLM does not look at the template."""
    tokenizer = DeepseekV32Tokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHAT)
    assert "User" in tokenizer.decode(ids)
    assert set(ids) <= set(range(2, 1024))


@pytest.mark.parametrize("size", [257, 1043])
def test_vocabulary_of_another_size_is_refused(size):
    with pytest.raises(ValueError, match=f"from 258 to 1042, got {size}"):
        make_tokenizer(size)
