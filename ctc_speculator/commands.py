"""The sub-commands of ``ctc``, each with the module whose ``main`` runs it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A sub-command.

    module: has ``main(argv)``, which returns an exit status; importing it imports no large library
    extra: the extra of the package that brings what it imports later
    arguments: put before those that are given
    """

    name: str
    module: str
    extra: str
    summary: str
    arguments: tuple[str, ...] = ()


COMMANDS = {
    command.name: command
    for command in (
        Command("train", "training.train", "train", "train draft heads for a Hugging Face model"),
        Command("distill", "training.distill", "train", "collect a model's answers as training data"),
        Command("build", "export.build_engines", "export", "build an engine bundle of a model and its head"),
        Command("generate", "runtime.generate", "cpu", "complete a prompt, or a file of prompts"),
        Command("profile", "runtime.profiler.__main__", "cpu", "measure a bundle against plain decoding"),
        Command(
            "serve",
            "triton_repo.serve",
            "serve",
            "serve a bundle through Triton or without it, and to OpenAI's clients",
            ("--server", "auto"),
        ),
        Command("client", "triton_repo.client", "serve", "stream a completion from a running server"),
        Command("openai", "triton_repo.openai.server", "serve", "offer a running server to OpenAI's clients"),
        Command("chat", "runtime.chat", "chat", "chat with a bundle's model in the terminal"),
        Command(
            "page", "triton_repo.page.__main__", "serve", "open a page that compares with plain decoding"
        ),
        Command(
            "publish",
            "integrations.transformers.publish",
            "train",
            "make a head ready for the Hugging Face hub",
        ),
        Command("bench", "benchmarks.methods.__main__", "bench", "compare draft heads side by side"),
    )
}
# The order of a first project: from a model to a served bundle, and what measures it.
GROUPS = {
    "a head and its engines": ("train", "distill", "build", "publish"),
    "decoding": ("generate", "chat", "profile", "bench"),
    "serving": ("serve", "client", "openai", "page"),
}
