"""Generated messages of ext_proc.proto, Envoy's external processing protocol."""

from kvroute.ext_proc.v3 import ext_proc_pb2 as ext_proc_pb2
