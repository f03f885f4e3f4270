"""Built graphs against PyTorch."""
