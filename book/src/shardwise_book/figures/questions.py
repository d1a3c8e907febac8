"""Questions at the end of a page: numbers and choices, judged at once and explained."""

import dataclasses
import hashlib
import math
import numbers
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from shardwise_book.figures.interactive import Interactive


@dataclasses.dataclass(frozen=True)
class Question:
    """One question, as `fill_in` or `choose` makes it, for `questions` to show.

    `told` holds pairs (answer, explanation) as HTML: the right answer's, then those of known
    mistakes. `judged` is what questions.js needs to tell which of them was given.
    """

    prompt: str
    told: tuple[tuple[str, str], ...]
    judged: dict[str, Any]
    controls: str  # HTML in which "@answer" stands for a name of this question alone

    @property
    def key(self) -> str:
        """What a reader's answer is kept under: another prompt is another question."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:10]


def fill_in(
    prompt: str,
    answer: float,
    *,
    unit: str = "",
    why: str,
    wrong: Mapping[float, str] | None = None,
    tolerance: float | None = None,
) -> Question:
    """A question whose answer is a number; texts are plain, with `code` in backticks.

    The reader may leave the unit out, write thousands apart, a product, a fraction or a power, and
    name a larger unit of bytes or of time. `why` explains the right answer. `wrong` maps known
    mistakes, numbers, to what each got wrong. `tolerance` is relative: by default 0 for a whole
    number, and 0.01 for any other.

    Raises:
      ValueError: a text is empty, a number is not finite, or a wrong one is as good as the right.
    """
    here = f"figures.fill_in({prompt!r})"
    _text(prompt, here)
    right = _number(answer, here)
    if tolerance is None:
        tolerance = 0 if isinstance(right, int) else 0.01
    if not 0 <= tolerance < 1:
        raise ValueError(f"{here}: tolerance={tolerance!r}: expected a share from 0 up, below 1.")
    mistakes = {_number(number, here): text for number, text in (wrong or {}).items()}
    for number in mistakes:
        if abs(number - right) <= tolerance * abs(right):
            raise ValueError(
                f"{here}: the wrong answer {number} is within {tolerance:.0%} of the right one, "
                f"{right}: take it out, or choose another case, in which the two differ."
            )
    told = {right: why} | mistakes
    judged = {"numbers": list(told), "unit": unit, "tolerance": tolerance}
    digits = (f"{n:,}" if isinstance(n, int) else f"{n:,.4g}" for n in told)
    answers = (f"{number} {escape(unit)}".strip() for number in digits)
    shown = tuple(zip(answers, (_text(text, here) for text in told.values()), strict=True))
    controls = (
        '<label>Your answer <input type="text" id="@answer" size="14" autocomplete="off" '
        f'autocapitalize="off" spellcheck="false"> {escape(unit)}</label>'
    )
    return Question(prompt, shown, judged, controls)


def choose(prompt: str, *, right: str, wrong: Mapping[str, str], why: str) -> Question:
    """A question with one right option; `wrong` maps each other option to why it is none.

    Texts are plain, with `code` in backticks. The options' order follows from their words.

    Raises:
      ValueError: a text is empty, there is no wrong option, or the right one is among them.
    """
    here = f"figures.choose({prompt!r})"
    _text(prompt, here)
    if not wrong:
        raise ValueError(f"{here}: no wrong option: a choice needs one at least.")
    told = [(right, why), *wrong.items()]
    if len({" ".join(option.lower().split()) for option, _ in told}) < len(told):
        raise ValueError(f"{here}: two of the options are the same: {[o for o, _ in told]}.")
    shown = tuple((_text(option, here), _text(text, here)) for option, text in told)
    # A place among the options that tells nothing, and is the same in every build.
    places = [hashlib.sha256(f"{prompt}\n{option}".encode()).digest() for option, _ in told]
    order = sorted(range(len(told)), key=places.__getitem__)
    controls = "".join(
        f'<label class="option"><input type="radio" name="@answer" value="{i}">'
        f"<span>{shown[i][0]}</span></label>"
        for i in order
    )
    return Question(prompt, shown, {}, controls)


def questions(*asked: Question) -> Interactive:
    """Show questions made by `fill_in` and `choose`; each is judged when the reader asks for it.

    In the built book answers stay on the reader's device; in a notebook they last as long as the
    page.

    Raises:
      ValueError: no question, or two with the same prompt.
      TypeError: something else than a question.
    """
    if strange := [one for one in asked if not isinstance(one, Question)]:
        raise TypeError(
            f"figures.questions: got {strange[0]!r}: expected what figures.fill_in or "
            "figures.choose returned."
        )
    if not asked or len({one.key for one in asked}) < len(asked):
        raise ValueError(
            "figures.questions: expected one question or more, each with a prompt of its own; got "
            f"{[one.prompt for one in asked]}."
        )
    still = (
        "<noscript><p>Without JavaScript nothing is judged here: each answer stands below its "
        "question.</p></noscript>"
    )
    for index, one in enumerate(asked):  # readable without the script: answers wait in <details>
        controls = one.controls.replace('="@answer"', f'="@{index}"')
        told = "".join(
            f"<p>{'Not ' * bool(i)}<b>{option}</b>{':' if i else '.'} "
            f'<span data-told="{i}">{text}</span></p>'
            for i, (option, text) in enumerate(one.told)
        )
        still += (
            f'<div class="shardwise-question" data-question="{one.key}"><fieldset disabled>'
            f"<legend>{index + 1}. {_text(one.prompt, '')}</legend>{controls}"
            '<button type="button">Check</button>'
            '<p class="verdict" role="status" aria-live="polite"></p></fieldset>'
            f"<details><summary>Show the answer</summary>{told}</details></div>"
        )
    return Interactive("questions.js", {"questions": [one.judged for one in asked]}, still)


def _text(text: str, here: str) -> str:
    """Plain text as HTML, with what stands between backticks as code."""
    if not text.strip() or text.count("`") % 2:
        wrong = "a backtick has no partner" if text.strip() else "a text is empty"
        raise ValueError(f"{here}: {wrong}: {text!r}.")
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text.strip()))


def _number(given: Any, here: str) -> int | float:
    """A Python number of whatever NumPy or JAX made it."""
    if getattr(given, "shape", ()) != ():
        raise ValueError(f"{here}: expected one number, got an array of shape {given.shape}.")
    value = given.item() if hasattr(given, "item") else given
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{here}: expected a finite number, got {given!r}.")
    return int(value) if isinstance(value, numbers.Integral) else float(value)
