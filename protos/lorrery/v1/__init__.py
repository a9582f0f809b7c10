"""The wire of the cluster: messages and stubs, made from the .proto files beside them by `make protos`."""
