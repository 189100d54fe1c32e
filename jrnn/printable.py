"""Text of files and users, made safe to show: a terminal, a drawing or a page sees no control characters of it."""

import re

# Control characters, marks that reorder or hide text, separators of lines, surrogates, and what XML forbids.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff-\uffff]")
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with an escape in place of each character that is not shown as itself.

    Args:
        text: any text.
        lines: whether line breaks and tabs stay as they are.

    >>> printable("w\x1b[2J\n"), printable("a\tb\n", lines=True)
    ('w\\x1b[2J\\n', 'a\tb\n')
    """
    return (_UNSAFE_IN_LINES if lines else _UNSAFE).sub(lambda found: ascii(found[0])[1:-1], text)
