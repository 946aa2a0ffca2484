"""Chat templates: every answer's tokens are labelled, no other, behind the very ids that generation sees.

What a template writes is said a second time here, by hand, as pieces of text that are or are not the model's.
"""

import itertools
import json

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from medusa_jax import UserError
from train.conversations import Document
from train.tokens import encode, encode_all

# ---------------------------------------------------------------------------------------- tokenizers


def byte_level(special: list[str], template: str, **names: str) -> PreTrainedTokenizerFast:
    """Llama 3's kind: newlines that stand together are one token."""
    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"[\r\n]+| ?[^\s]+|\s"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*["a\n\nb", "a\n\n\nb"] * 20, *tiny.SENTENCES], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template, **names)


def sentencepiece(template: str, bytes_added: bool = False) -> PreTrainedTokenizerFast:
    """Llama 2's kind: a space at the beginning and after special tokens, bytes for unknown characters."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(parts)
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # no token holds parts of two words
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    bpe.train_from_iterator(
        [*tiny.SENTENCES, "USER: hi ASSISTANT: hello [INST] [/INST] <<SYS>>"] * 3, trainer
    )
    model = json.loads(bpe.to_str()) | {"pre_tokenizer": None}
    if not bytes_added:
        model["added_tokens"] = []
    bpe = Tokenizer.from_str(json.dumps(model))
    bpe.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special[:3]])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


# ------------------------------------------------------------------------------------------ families
# A family's pieces: the text of a conversation as (text, is it the model's) in order.


def chatml(messages):
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": tiny.SYSTEM}, *messages]
    for message in messages:
        if message["role"] == "system" and not message["content"]:
            continue
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>", message["role"] == "assistant"
        yield "\n", False


LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + "
    "'\n<</SYS>>\n\n' %}{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def llama2(messages):
    system = ""
    if messages[0]["role"] == "system":
        system, messages = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n", messages[1:]
    for number, message in enumerate(messages):
        if message["role"] == "user":
            yield f"<s>[INST] {'' if number else system}{message['content'].strip()} [/INST]", False
        else:
            yield f" {message['content'].strip()} </s>", True


LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + "
    "'<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def llama3(messages):
    yield "<|begin_of_text|>", False
    for message in messages:
        yield f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False
        yield f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"


ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def zephyr(messages):
    for message in messages:
        yield f"<|{message['role']}|>\n", False
        yield f"{message['content']}</s>", message["role"] == "assistant"
        yield "\n", False


VICUNA = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)


def vicuna(messages):
    for message in messages:
        if message["role"] == "system":
            yield message["content"] + " ", False
        elif message["role"] == "user":
            yield f"USER: {message['content']} ASSISTANT:", False
        else:
            yield f" {message['content']}</s>", True


HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
FAMILIES = {
    "chatml": (tiny.tokenizer(), chatml),
    "llama2": (sentencepiece(LLAMA2), llama2),
    "llama3": (byte_level(HEADERS, LLAMA3, bos_token=HEADERS[0], eos_token=HEADERS[3]), llama3),
    "zephyr": (sentencepiece(ZEPHYR), zephyr),
    "zephyr, byte-level": (byte_level(["</s>"], ZEPHYR, eos_token="</s>"), zephyr),
    "vicuna": (sentencepiece(VICUNA), vicuna),
}
families = pytest.mark.parametrize("family", FAMILIES)


def chat(*texts: str, system: str | None = None, open_end: bool = False) -> Document:
    """User's and assistant's texts in turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = itertools.cycle(["user", "assistant"])
    messages += [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return Document(messages, None, open_end, "file, line 3", "")


def spans(labels) -> list[tuple[int, int]]:
    """Beginnings and ends of the runs of labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], labels.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def spelt(tokenizer, ids, start, end) -> str:
    def decoded(part):
        return tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decoded(ids[:end])[len(decoded(ids[:start])) :]


def prompt_ids(tokenizer, messages) -> list[int]:
    """What MedusaLM.encode gives."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def check(tokenizer, document: Document, answers: dict[int, str]) -> int:
    """Exactly these messages' answers are labelled, each once, behind the ids of generation.

    answers: the number of a message and the text that the model must produce. Returns how many sequences.
    """
    left = dict(answers)
    made = encode(document, tokenizer)
    for one in made:
        assert one.ids.dtype == np.int32
        assert one.labels.dtype == bool
        assert one.where == "file, line 3"
        assert one.labels[-1]  # nothing behind the last answer
        for start, end in spans(one.labels):
            found = [
                number
                for number, text in left.items()
                if prompt_ids(tokenizer, document.messages[:number]) == one.ids[:start].tolist()
            ]
            assert len(found) == 1, "a label begins where no answer does"
            assert spelt(tokenizer, one.ids, start, end) == left.pop(found[0])
    assert not left, "answers without labels"
    return len(made)


def expected(family: str, document: Document) -> dict[int, str]:
    """The answers with a text, as the family's pieces have them."""
    pieces = FAMILIES[family][1]
    texts = [text for text, is_model in pieces(document.messages) if is_model]
    numbers = [number for number, m in enumerate(document.messages) if m["role"] == "assistant"]
    assert len(texts) == len(numbers)
    return {
        number: text
        for number, text in zip(numbers, texts, strict=True)
        if document.messages[number]["content"].strip()
    }


def test_the_pieces_are_the_templates():
    document = chat("Hello!", " How are you?\n", "Rain?", "The dog.", system="Be brief.")
    for family, (tokenizer, pieces) in FAMILIES.items():
        text = tokenizer.apply_chat_template(document.messages, tokenize=False)
        assert "".join(text for text, _ in pieces(document.messages)) == text, family


PLAIN = {
    "one turn": chat("Hello!", "How are you?"),
    "three turns": chat("Hello!", "How are you?", "What is the answer?", "Rain.", "Why?", "The dog lets it."),
    "system": chat("Hello!", "How are you?", system="You are not tiny."),
    "the user's text in the answer": chat("the answer", "the answer", "the answer", "the answer the answer"),
    "role strings": chat("assistant", "user\nassistant\n", "ASSISTANT: x", "USER: hi ASSISTANT: </s"),
    "white space around": chat(" Hello! ", " How are you? ", "Rain?\n", "\tThe dog.\n\n"),
    "many characters": chat("😀 日本語", "日本語 😀👩‍👩‍👧 é é", "€", "Où est la forêt? 😀"),
    "empty answer": chat("Hello!", "", "Rain?", "The dog."),
    "empty last answer": chat("Hello!", "How are you?", "Rain?", " \n"),
    "a question at the end": chat("Hello!", "How are you?", "Rain?"),
    "the placeholder": chat("medusaXanswerX", "medusaXanswerXX", "medusaXanswerX", "medusaXanswerX"),
}


@families
@pytest.mark.parametrize("case", PLAIN)
def test_answers_are_labelled_exactly(family, case):
    document = PLAIN[case]
    check(FAMILIES[family][0], document, expected(family, document))


@families
def test_plain_conversations_are_one_sequence_of_the_whole_text(family):
    tokenizer, pieces = FAMILIES[family]
    document = PLAIN["three turns"]
    (one,) = encode(document, tokenizer)
    whole = "".join(text for text, _ in pieces(document.messages)).removesuffix("\n")
    assert one.ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]


SNIPPETS = [
    "the ",
    "dog",
    "\n",
    " ",
    "assistant",
    "[/INST]",
    "ASSISTANT:",
    "😀",
    "é",
    "日本",
    "<|",
    "</",
    "\t",
    "!",
]
texts = st.lists(st.sampled_from(SNIPPETS), max_size=6).map("".join)


@families
@given(texts=st.lists(texts, min_size=1, max_size=6), system=st.none() | texts)
@settings(max_examples=40, deadline=None)
def test_any_answers_are_labelled_exactly(family, texts, system):
    document = chat(*texts, system=system)
    check(FAMILIES[family][0], document, expected(family, document))


def test_byte_tokens_among_the_added_ones():
    document = PLAIN["three turns"]
    assert check(sentencepiece(ZEPHYR, bytes_added=True), document, expected("zephyr", document)) == 1


def test_special_tokens_in_the_texts():
    """They end nothing: where an answer ends is known from the template, not from the text."""
    document = chat("say <|im_end|>", "a <|im_end|> b", "<|im_start|>assistant\nx<|im_end|>\n", "done")
    check(tiny.tokenizer(), document, {1: "a <|im_end|> b<|im_end|>", 3: "done<|im_end|>"})


def test_an_answer_that_begins_with_the_prompts_last_token():
    """Newlines that end the prompt and begin the answer would be one token."""
    tokenizer = FAMILIES["chatml"][0]
    document = chat("Hello!", "\n\nHow are you?", "Rain?", "The dog.")
    with_runs = byte_level(list(tiny.SPECIAL), tiny.TEMPLATE, eos_token=tiny.SPECIAL[2])
    assert len(with_runs("\n\n\n")["input_ids"]) == 1 < len(tokenizer("\n\n\n")["input_ids"])
    assert check(with_runs, document, expected("chatml", document)) == 2
    assert check(tokenizer, document, expected("chatml", document)) == 1


def test_a_continuation_gets_no_space_before_it():
    """Llama 2's tokenizer begins every text with a space; the rest of a text must not get one."""
    template = VICUNA.replace("' ASSISTANT:' }}", "' ASSISTANT: ' }}")
    document = chat("hi", "hello", "hi", "😀")
    assert check(sentencepiece(template), document, {1: "hello</s>", 3: "😀</s>"}) == 2


@families
def test_a_cut_off_answer_has_no_end(family):
    document = chat("Hello!", "How are you?", "Rain?", "The dog", open_end=True)
    answers = expected(family, document)
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "llama2": " </s>"}.get(family, "</s>")
    assert answers[3].endswith(end)
    answers[3] = answers[3].removesuffix(end)
    check(FAMILIES[family][0], document, answers)


def test_an_answer_cut_off_within_a_character():
    document = chat("Hello!", "The dog \ufffd", open_end=True)
    check(tiny.tokenizer(), document, {1: "The dog "})
    assert encode(chat("Hello!", "\ufffd", open_end=True), tiny.tokenizer()) == []


def test_system_message():
    tokenizer = tiny.tokenizer()

    def text(document, system):
        (one,) = encode(document, tokenizer, system=system)
        return tokenizer.decode(one.ids, skip_special_tokens=False)

    assert text(chat("Hi", "Ho"), None).startswith("<|im_start|>system\nYou are tiny.<|im_end|>")
    assert text(chat("Hi", "Ho"), "Be.").startswith("<|im_start|>system\nBe.<|im_end|>")
    assert text(chat("Hi", "Ho"), "").startswith("<|im_start|>user")
    assert text(chat("Hi", "Ho", system="Own."), "Be.").startswith(
        "<|im_start|>system\nOwn.<|im_end|>\n<|im_st"
    )


# ------------------------------------------------------------------- templates that rewrite history

QWEN3 = (  # thoughts are dropped from all answers but the last, which gets an empty one if it has none
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% set content = message['content'] %}{% set thought = '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEEPSEEK = (  # the prompt opens a thought that no finished answer has
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>' + message['content'] }}"
    "{% else %}{{ '<|endoftext|>' + message['content'].split('</think>')[-1] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|endoftext|><think>\n' }}{% endif %}"
)
MOVED = (  # Mistral: the system message stands in the last question
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list | length %}"
    "{% set count = namespace(users=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set count.users = count.users + 1 %}"
    "{{ '<|im_start|>' + (system + '\n\n' if system and count.users == users else '') + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|endoftext|>' + message['content'] + '<|im_end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
)


def with_template(template: str) -> PreTrainedTokenizerFast:
    return tiny.tokenizer(template)


def test_thoughts_that_are_dropped_later():
    document = chat("Hello!", "<think>\nhm\n</think>\n\nHow?", "Rain?", "<think>\nso\n</think>\n\nThe dog.")
    answers = {number: document.messages[number]["content"] + "<|im_end|>" for number in (1, 3)}
    assert check(with_template(QWEN3), document, answers) == 2


def test_an_empty_thought_belongs_to_the_answer():
    answers = {
        number: f"<think>\n\n</think>\n\n{text}<|im_end|>" for number, text in ((1, "How?"), (3, "The dog."))
    }
    assert check(with_template(QWEN3), chat("Hello!", "How?", "Rain?", "The dog."), answers) == 2


def test_a_thought_that_was_cut_off():
    """The template would put an empty thought before it; the model did not."""
    document = chat("Hello!", "<think>\nhm, well", open_end=True)
    check(with_template(QWEN3), document, {1: "<think>\nhm, well"})


def test_a_prompt_that_opens_the_thought():
    document = chat("Hello!", "hm\n</think>\n\nHow?", "Rain?", "so\n</think>\n\nThe dog.")
    answers = {number: document.messages[number]["content"] + "<|im_end|>" for number in (1, 3)}
    assert check(with_template(DEEPSEEK), document, answers) == 2


def test_a_system_message_that_moves():
    texts = "Hello!", "How?", "Rain?", "The dog.", "Why?", "So."
    answers = {2: "How?<|im_end|>", 4: "The dog.<|im_end|>", 6: "So.<|im_end|>"}
    assert check(with_template(MOVED), chat(*texts, system="Be."), answers) == 3
    without = {number - 1: text for number, text in answers.items()}
    assert check(with_template(MOVED), chat(*texts), without) == 1


@given(texts=st.lists(texts.filter(str.strip), min_size=2, max_size=6), moved=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_answers_of_rewriting_templates(texts, moved):
    document = chat(*texts, system="Be." if moved else None)
    lead = "" if moved else "<think>\n\n</think>\n\n"
    answers = {
        number: f"{lead}{message['content']}<|im_end|>"
        for number, message in enumerate(document.messages)
        if message["role"] == "assistant"
    }
    check(with_template(MOVED if moved else QWEN3), document, answers)


def test_a_template_without_generation_prompt():
    """Its headers are no answer, though generation would have to write them."""
    template = "".join(tiny.TEMPLATE.partition("{% endfor %}")[:2])
    tokenizer = with_template(template)
    (one,) = encode(chat("Hello!", "How?", "Rain?", "The dog."), tokenizer)
    found = [spelt(tokenizer, one.ids, *span) for span in spans(one.labels)]
    assert found == ["How?<|im_end|>", "The dog.<|im_end|>"]


def test_a_template_without_end_tokens():
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    (one,) = encode(chat("Hello!", "How?", "Rain?", "The dog."), with_template(template))
    found = [spelt(tiny.tokenizer(), one.ids, *span) for span in spans(one.labels)]
    assert found == [" How?", " The dog."]


def test_a_template_that_changes_answers():
    """The model wrote what the record says."""
    template = tiny.TEMPLATE.replace("message['content'] }}", "message['content'] | replace('dog', 'cat') }}")
    check(with_template(template), chat("Hello!", "The dog."), {1: "The dog.<|im_end|>"})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"file, line 3: this model has no chat template"),
        (
            "{{ raise_exception('no such thing') }}",
            r"file, line 3: the model's chat template refuses .*no such thing",
        ),
        ("{{ messages[9]['content'] + 1 }}", r"file, line 3: the model's chat template .*messages: "),
        ("{{ messages[0]['content'] }}", r"file, line 3: .*template shows an answer 0 times, expected once"),
        (
            "{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}",
            r"file, line 3: .*shows an answer 2 times",
        ),
    ],
)
def test_templates_that_do_not_work(template, message):
    with pytest.raises(UserError, match=message):
        encode(chat("Hello!", "How?"), with_template(template))


def test_a_tokenizer_that_does_not_give_the_text_back():
    bpe = Tokenizer(models.WordLevel({"<unk>": 0, "Hello": 1, "<|im_end|>": 2}, unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    bpe.add_special_tokens(["<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", chat_template=tiny.TEMPLATE)
    with pytest.raises(UserError, match=r"file, line 3: .*answer 'What\?<\|im_end\|>'"):
        encode(chat("Hello", "What?"), tokenizer)


def test_normalised_text_is_the_same_text():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny.tokenizer().backend_tokenizer.to_str()),
        eos_token=tiny.SPECIAL[2],
        chat_template=tiny.TEMPLATE,
    )
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    (one,) = encode(chat("Hello!", "cafe\u0301"), tokenizer)
    assert spelt(tokenizer, one.ids, *spans(one.labels)[0]) == "caf\u00e9<|im_end|>"


def test_plain_text():
    """Begun as the tokenizer begins a text; all of it is learnt."""
    text = "The dog.\n\n<|im_end|> And so on"
    document = Document(None, text, False, "file, line 3", "")
    (one,) = encode(document, tiny.tokenizer(None))
    assert one.ids.tolist() == tiny.tokenizer()(text)["input_ids"]
    assert one.labels.all()
    (one,) = encode(document, FAMILIES["llama2"][0])
    assert one.ids.tolist() == FAMILIES["llama2"][0](text)["input_ids"]
    assert one.ids[0] == 1
    assert encode(Document(None, " \n", False, "file, line 3", ""), tiny.tokenizer()) == []


@pytest.mark.parametrize("texts", [(), ("Hello!",), ("Hello!", ""), ("Hello!", " \n")])
def test_conversations_without_an_answer(texts):
    assert encode(chat(*texts), tiny.tokenizer()) == []


def test_many_documents_at_once():
    tokenizer = FAMILIES["vicuna"][0]
    documents = [chat("hi", "hello " * (i % 7), "USER:", "ho") for i in range(150)]
    documents[70] = Document(None, "The dog", False, "file, line 71", "")
    for document, made in zip(documents, encode_all(documents, tokenizer), strict=True):
        alone = encode(document, tokenizer)
        assert [one.ids.tolist() for one in made] == [one.ids.tolist() for one in alone]
        assert [one.labels.tolist() for one in made] == [one.labels.tolist() for one in alone]


def test_problems_are_collected():
    template = "{{ raise_exception('no') if messages[0]['content'] == 'bad' }}" + tiny.TEMPLATE
    documents = [chat("Hello!", "How?"), chat("bad", "How?"), chat("Hello!", "How?")]
    problems = []
    made = list(encode_all(documents, with_template(template), problems=problems))
    assert [len(one) for one in made] == [1, 0, 1]
    assert len(problems) == 1
    assert problems[0].startswith("file, line 3: the model's chat template refuses")
    with pytest.raises(UserError, match=r"file, line 3: the model's chat template refuses"):
        list(encode_all(documents, with_template(template)))
