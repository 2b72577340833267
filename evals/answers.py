r"""Finds the final answer in a response and reads integers from the ways people write them.

The answer is the content of the last balanced `\boxed{}` or `\fbox{}` after the end of reasoning. Everything here is
linear in the length of the response, so that a degenerate one costs no more than a good one.
"""

import re

THINK_START, THINK_END = "<think>", "</think>"

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BOXES = (r"\boxed", r"\fbox")

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),  # minus, hyphens, dashes
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},  # full-width digits
        "\u200b": "",
        "\ufeff": "",
        "\uff0b": "+",
        "\uff0c": ",",
    }
)
_LAYOUT = re.compile(r"\\(?:displaystyle|textstyle|left|right|bigl?|bigr?|limits)(?![A-Za-z])")
_SPACE = re.compile(r"(?:\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s)+")
_WRAPPER = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mathtt|mbox|operatorname|bm|boldsymbol)\s*"
_WRAPPED_NUMBER = re.compile(_WRAPPER + r"\{([-+0-9,. ]*)\}")
_LEADING_WORDS = re.compile(r"^" + _WRAPPER + r"\{[^{}0-9:=]*[:=] ?\}")
_UNIT = re.compile(_WRAPPER + r"\{ ?[A-Za-z][^{}0-9]*\}(?:\^(?:[0-9]|\{[0-9]\}))?$")
_DEGREES = re.compile(r"(?:\^ ?(?:\\(?:circ|degree)|\{ ?\\(?:circ|degree) ?\})|\\degree|°)$")
_ASSIGNMENT = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?\s*=\s*")
_INTEGER = re.compile(r"([-+]?) ?([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)(?:\.0*)?")
_DECIMAL = re.compile(r"[-+]?[0-9]*\.[0-9]+")


def extract_answer(response: str) -> str | None:
    r"""The content of the last balanced box after the end of reasoning; None without one, or when it is empty.

    Reasoning that was opened and not closed holds no answer. Of nested boxes the inner one counts.
    """
    final = response.rpartition(THINK_END)[2]
    if THINK_START in final:
        return None
    best = (-1, "")  # (start, content): the box that opens last
    open_braces: list[tuple[int, bool]] = []  # (where the content starts, whether it is a box)
    for match in _BRACES.finditer(final, _first_box(final)):
        token = match.group()
        if token.endswith("{") and token != r"\{":
            open_braces.append((match.end(), token != "{"))
        elif token == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and start > best[0]:
                best = (start, final[start : match.start()])
    return best[1].strip() or None


def _first_box(text: str) -> int:
    """Where to begin: no brace before the first box can close one or belong to one."""
    start = min((place for box in _BOXES if (place := text.find(box)) >= 0), default=len(text))
    while start > 0 and text[start - 1] == "\\":  # an escaped backslash is no beginning of a box
        start -= 1
    return start


def clean(answer: str) -> str:
    """The answer without what does not change its meaning: layout, spacing, dollar signs, unicode spellings."""
    text = answer.translate(_CHARACTERS).strip()
    text = text.replace("{,}", ",").replace(r",\!", ",").replace(r"\$", "").replace("$", "")
    text = text.removeprefix(r"\(").removeprefix(r"\[").removesuffix(r"\)").removesuffix(r"\]")
    text = _LAYOUT.sub("", text)
    text = _SPACE.sub(" ", text)
    return text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac").strip()


def integer(answer: str) -> str | None:
    """The integer an answer spells, in canonical decimal (`-0042.` → `-42`); None when it spells none.

    A string, since Python's own conversion is quadratic and refuses more than 4,300 digits. Commas and spaces must
    group by thousands: `1,234` is a number, `1,2` a list.
    """
    text = _WRAPPED_NUMBER.sub(r"\1", clean(answer).removesuffix("."))
    text = _LEADING_WORDS.sub("", text, count=1).strip()
    text = _ASSIGNMENT.sub("", text)
    for suffix in (_UNIT, _DEGREES):
        text = suffix.sub("", text).rstrip()
    text = text.removesuffix("%").removesuffix("\\").strip("{} ")
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match.group(2).replace(",", "").replace(" ", "").lstrip("0") or "0"
    return f"-{digits}" if match.group(1) == "-" and digits != "0" else digits


def is_decimal(answer: str) -> bool:
    """Whether the answer is a plain decimal fraction (`3.14`)."""
    return _DECIMAL.fullmatch(clean(answer)) is not None
