"""The persistent server: OpenAI-compatible HTTP, gRPC, replicas, and what watches over them."""
