"""Caffe2's nets: records, wire format, operators, building, running and differentiating, cells. `ir.py` has the records."""
