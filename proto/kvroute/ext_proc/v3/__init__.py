"""Messages of ext_proc.proto."""

from kvroute.ext_proc.v3 import ext_proc_pb2 as ext_proc_pb2
