"""The gRPC door: the service of ``fastgen.proto``, standard health, reflection."""
