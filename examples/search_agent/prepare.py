"""Makes corpus and questions again: ``corpus.jsonl``, ``train.jsonl`` and ``test.jsonl``. From the repository root:

python -m examples.search_agent.prepare
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.quickstart.tasks import Example, write_jsonl
from examples.tool_model.dialogues import leader_fact, leader_question, name, town_fact

FOLDER = Path(__file__).parent
LANDS, TOWNS = 240, 80
TEST_SIZE = 40
SEED = 4


def corpus_and_questions() -> tuple[list[dict[str, str]], list[Example]]:
    """Documents about lands and towns, shuffled, and a question about each land that takes two of them to answer."""
    random_ = random.Random(SEED)
    names: list[str] = []
    while len(names) < LANDS + 2 * TOWNS:
        candidate = name(random_)
        if candidate not in names:
            names.append(candidate)
    lands, towns, leaders = names[:LANDS], names[LANDS : LANDS + TOWNS], names[LANDS + TOWNS :]
    ruled_from = {land: random_.randrange(TOWNS) for land in lands}
    documents = [{"title": land, "text": town_fact(land, towns[ruled_from[land]])} for land in lands]
    documents += [{"title": town, "text": leader_fact(town, leaders[i])} for i, town in enumerate(towns)]
    random_.shuffle(documents)
    questions = [Example(prompt=leader_question(land), digits="", label=leaders[ruled_from[land]]) for land in lands]
    return documents, questions


def main() -> None:
    documents, questions = corpus_and_questions()
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (FOLDER / "corpus.jsonl").write_text(lines)
    write_jsonl(questions[:TEST_SIZE], FOLDER / "test.jsonl")
    write_jsonl(questions[TEST_SIZE:], FOLDER / "train.jsonl")


if __name__ == "__main__":
    main()
