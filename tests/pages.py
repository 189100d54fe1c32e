"""Pages of documentation as programs: their blocks run as printed, in one directory and in order."""

import re
import shlex
from pathlib import Path

from jrnn.cli import main


def blocks_of(text):
    """The blocks of code of a page: pairs of their language and what stands in them."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(block):
    """The command lines of a block, without comments and empty lines; a line that ends in a backslash goes on."""
    joined = block.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def run_blocks(name, blocks):
    """Runs blocks in the working directory, which later ones find as the earlier left it; returns the commands that ran.

    A block that begins with `# file: NAME` is written to that file.
    """
    ran, names = set(), {"__name__": name}
    for number, (language, block) in enumerate(blocks, 1):
        if file := re.match(r"# file: (\S+)\n", block):
            Path(file[1]).write_text(block, encoding="utf-8")
        elif language == "python":
            exec(compile(block, f"{name}, block {number}", "exec"), names)
        elif language == "sh":
            for words in commands(block):
                assert words[0] == "jrnn", words
                assert main(words[1:]) == 0, words
                ran.add(words[1])
    return ran
