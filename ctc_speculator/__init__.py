"""The command ``ctc``: one name for every command line of the project."""
