"""Our own process in the place of tritonserver: the models, gRPC in Triton's protocol, and metrics."""
