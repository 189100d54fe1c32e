"""Processes that run the command `jrnn`: forks of one that has loaded JAX and jrnn, and has computed nothing yet.

To import both takes seconds, and so does not count once a process. Run as a program, this file is the process that forks.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path


class Forks:
    """Starts processes, each with a working folder of its own for what it prints."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0
        command = [sys.executable, "-W", "ignore:.*fork:DeprecationWarning", __file__]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self,
        *words: str,
        kill_at: int | None = None,
        environment: dict[str, str] | None = None,
        exits: bool = False,
    ) -> Fork:
        """Starts `jrnn` with these arguments. With `kill_at`, it kills itself at that operation on a file of the run.

        With `exits`, it ends as the command does: what is registered to run at the end of Python runs.

        The process finds the number of a socket in the environment variable TALK; `Fork.talk` is the other end.
        """
        self._count += 1
        asked = {
            "words": words,
            "kill_at": kill_at,
            "environment": environment or {},
            "exits": exits,
            "files": str(self._folder / str(self._count)),
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{asked['files']}.talk")
            listener.listen()
            pid = self.ask(asked)
            return Fork(self, pid, Path(asked["files"]), listener.accept()[0])

    def run(self, *words: str, kill_at: int | None = None) -> Fork:
        """Starts `jrnn` and waits for its end."""
        return self.start(*words, kill_at=kill_at).wait()

    def ask(self, question):
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


class Fork:
    """A process that was started. At its end `status`, `out`, `err` and `operations` (on files of the run) are known.

    `talk` is a socket, which reads as empty when the process has ended.
    """

    def __init__(self, forks, pid, files, talk):
        self._forks, self.pid, self._files, self.talk = forks, pid, files, talk

    def wait(self) -> Fork:
        self.status = self._forks.ask({"wait": self.pid})
        self.talk.close()
        self.out, self.err = (Path(f"{self._files}.{name}").read_text() for name in ("out", "err"))
        counted = Path(f"{self._files}.operations")
        self.operations = int(counted.read_text()) if counted.exists() else None
        return self


OPERATIONS = {
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "os.symlink",
}


def _become(asked) -> int:
    """What a fork does, until its end."""
    import signal

    from jrnn.cli import main

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{asked['files']}.{name}", os.O_WRONLY | os.O_CREAT), number)
    talk = socket.socket(socket.AF_UNIX)
    talk.connect(f"{asked['files']}.talk")
    os.environ.update({**asked["environment"], "TALK": str(talk.detach())})
    words, seen = asked["words"], 0
    run = words[words.index("--out") + 1] if "--out" in words else ""

    def count(event, args):
        nonlocal seen
        if event in OPERATIONS and str(args[0]).startswith(run):  # imports open files, too
            seen += 1
            if seen == asked["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        if asked["exits"]:
            sys.argv = ["jrnn", *words]
            status = main()
            atexit._run_exitfuncs()
        else:
            status = main(words)
        Path(f"{asked['files']}.operations").write_text(str(seen))
        return status
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _serve():
    import jrnn.cli
    import jrnn.nets.ops  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                os._exit(_become(asked))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
