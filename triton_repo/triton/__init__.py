"""The Triton server: its processes and configurations, the backend in them, and the client of their gRPC."""
