"""Which part of a response is its answer."""

import random

from beam_rl.evals.answers import extract_answer


def test_extracted_answer_keeps_nested_braces() -> None:
    assert extract_answer(r"So \boxed{\frac{1}{\sqrt{2}}}.") == r"\frac{1}{\sqrt{2}}"
    assert extract_answer(r"\boxed{\left\{1, 2\right.}") == r"\left\{1, 2\right."


def test_skipping_to_the_first_box_finds_the_same_answer() -> None:
    """Against a reading of the rule by characters: of the balanced boxes, the one that opens last."""
    rng = random.Random(0)
    pieces = ["\\boxed{", "\\fbox {", "\\boxed", "{", "}", "\\{", "\\}", "\\\\", "\\", "1", " ", "\n"]
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        assert extract_answer(text) == _by_characters(text), repr(text)


def _by_characters(text: str) -> str | None:
    place, opened, found = 0, [], (-1, "")
    while place < len(text):
        box = next((word for word in ("\\boxed", "\\fbox") if text.startswith(word, place)), None)
        brace = place + len(box) if box else -1
        while box and text[brace : brace + 1].isspace():
            brace += 1
        if box and text[brace : brace + 1] == "{":
            opened.append((brace + 1, True))
            place = brace + 1
        elif text[place] == "\\":
            place += 2
        else:
            if text[place] == "{":
                opened.append((place + 1, False))
            elif text[place] == "}" and opened:
                start, is_box = opened.pop()
                if is_box and start > found[0]:
                    found = (start, text[start:place])
            place += 1
    return found[1].strip() or None
