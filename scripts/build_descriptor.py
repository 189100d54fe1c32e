"""Makes jrnn/nets/proto/caffe2.desc from jrnn/nets/proto/caffe2.proto.

Run it after a change of the schema, where `pip install grpcio-tools` gives a protobuf compiler:

    python scripts/build_descriptor.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).resolve().parent.parent / "jrnn" / "nets" / "proto"


def main() -> int:
    return protoc.main(
        [
            "protoc",
            f"--proto_path={FOLDER}",
            f"--descriptor_set_out={FOLDER / 'caffe2.desc'}",
            "caffe2.proto",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
