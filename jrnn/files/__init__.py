"""Files: the one opener, the one reader of JSON, and the one writer, through which jrnn reads and writes all files.

In: paths, bytes and JSON of strangers. Out: checked records and arrays; files that are whole. Read `reading.py` first.

What is read may be a stranger's: `reading` opens regular files of bounded size only, and `checked` reads JSON, each value
with its type and bounds. What is written, by `writing`, is the old or the new, never a mixture.
"""

from jrnn.files.checked import AtLeast, checked, parse_json, plain, read_json, record
from jrnn.files.reading import (
    LARGEST,
    blocks,
    digest_of,
    kind_of,
    open_file,
    read_file,
    read_rest,
    read_text,
)
from jrnn.files.writing import append_to, new_file, new_folder, reporting, write_whole
