"""The old name of ``integrations.transformers.publish``, for one release."""

from integrations.transformers.publish import PublishError, main, write_hub_files

__all__ = ["PublishError", "main", "write_hub_files"]

if __name__ == "__main__":
    raise SystemExit(main())
