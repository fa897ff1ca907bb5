"""Generated from ``fastgen/wire/fastgen.proto``; not to be edited. In the repository's root:

::

    python -m grpc_tools.protoc --proto_path=fastgen/wire/pb=fastgen/wire --python_out=. --pyi_out=. \\
        fastgen/wire/pb/fastgen.proto

The grpcio-tools that did it (1.68) is the oldest whose code we support: code asks for the protobuf it was made with, or
a newer one.
"""
