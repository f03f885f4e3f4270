"""``ctc distill`` with a server that speaks OpenAI's protocol.

Several requests are under way at a time, and every answer is written as soon as it arrives.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any

import openai
from tqdm import tqdm

from runtime.core.jsonl_store import JsonlStore
from training.data.answers import Prompt
from training.data.self_prompts import SelfPrompts, UserTemplate, self_prompts_record, write_self_prompts
from training.settings import DistillConfig, TrainingError

# Statuses that reject one prompt, most often because it is too long for the model.
REFUSED = (400, 413, 422)
# Statuses of a temporary problem, like all from 500. The client has already tried again.
TRANSIENT = (408, 409, 429)
# The run ends after this many failures in a row, beyond the requests under way.
MAX_FAILURES_IN_A_ROW = 16
# Time limit of the first request, which only asks whether there is a server.
GREETING_SECONDS = 30.0


def served_self_prompts(config: DistillConfig) -> list[str]:
    """Let the served model write ``config.self_prompts`` prompts, beginning with those that are kept already.

    Raises TrainingError when the server cannot be used, or the model writes nothing of use.
    """
    tokenizer = template_tokenizer(config)
    record = self_prompts_record(config, tokenizer, model_name=config.model_name, seed=config.seed)
    prompts = SelfPrompts(config.prompts_path, record, tokenizer.all_special_tokens, flag="--out")
    assert config.self_prompts is not None
    with asyncio.Runner() as runner:
        client = _client(config)

        def draw(templates: Sequence[UserTemplate], seed: int, missing: int) -> list[tuple[str, bool]]:
            # One more than is missing, because some are left out.
            seeds = range(seed, seed + min(config.concurrency, missing + 1))
            return runner.run(_user_messages(client, config, zip(cycle(templates), seeds, strict=False)))

        try:
            write_self_prompts(draw, prompts, config.self_prompts)
        finally:
            runner.run(client.close())
    print("\n".join(prompts.report()), flush=True)
    return prompts.texts[: config.self_prompts]


async def _user_messages(
    client: Any, config: DistillConfig, turns: Iterable[tuple[UserTemplate, int]]
) -> list[tuple[str, bool]]:
    """For every template and seed what the model writes as a user, and whether the model ended it."""
    try:
        return await asyncio.gather(*(_user_message(client, config, *turn) for turn in turns))
    except openai.APITimeoutError as error:
        raise TrainingError(
            f"--base-url: {config.base_url}: no answer within {config.timeout:g} s (--timeout)"
        ) from error
    except openai.APIConnectionError as error:
        raise _unreachable(config, error) from error
    except (openai.OpenAIError, ValueError) as error:
        raise TrainingError(
            f"--base-url: {config.base_url}: no raw completion, which --self-prompts needs: {_line(error)}"
        ) from error


async def _user_message(
    client: Any, config: DistillConfig, template: UserTemplate, seed: int
) -> tuple[str, bool]:
    reply = await client.completions.create(
        model=config.model,
        prompt=template.prefix,
        max_tokens=config.max_prompt_tokens,
        temperature=config.prompt_temperature,
        top_p=config.prompt_top_p,
        stop=[template.end_text],
        seed=seed,
    )
    text, reason = _answer(reply)
    return text, reason == "stop"


def template_tokenizer(config: DistillConfig) -> Any:
    """The tokenizer of ``--chat-template``. Raises TrainingError for a directory without one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.chat_template)
    except (OSError, ValueError) as error:
        reason = _line(error)
        raise TrainingError(f"--chat-template: {config.chat_template}: {reason}") from error


def _client(config: DistillConfig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=config.base_url,
        api_key=config.api_key,
        timeout=config.timeout,
        max_retries=config.max_retries,
    )


class Distillation:
    """Asks for the prompts that have no answer yet, several at a time, and keeps the answers.

    failures: the reasons why prompts have no answer, in the order of their failures
    """

    def __init__(self, config: DistillConfig, prompts: list[Prompt], answers: JsonlStore, answered: set[str]):
        """``answers`` and ``answered`` are what ``open_answers`` returns."""
        self._config = config
        self._answers, self._answered = answers, answered
        self._waiting = [prompt for prompt in prompts if prompt.id not in answered]
        self._failed_in_a_row = 0
        self.failures: list[str] = []
        done = len(prompts) - len(self._waiting)
        self._bar = tqdm(total=len(prompts), initial=done, desc="distilling", unit="prompt")

    async def run(self) -> None:
        """Ask for all waiting prompts. Raises TrainingError when the server cannot be used, also midway."""
        config = self._config
        queue = iter(self._waiting)
        with self._bar:
            if not self._waiting:
                return
            async with _client(config) as client:
                await self._greet(client)
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(config.concurrency, len(self._waiting))):
                            group.create_task(self._work(client, queue))
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None

    async def _greet(self, client: Any) -> None:
        """Ask once, without retries, whether there is a server. Raises TrainingError if there is none."""
        hasty = client.with_options(max_retries=0, timeout=min(GREETING_SECONDS, self._config.timeout))
        try:
            await hasty.models.with_raw_response.list()
        except openai.APITimeoutError:
            pass  # The server is busy.
        except openai.APIConnectionError as error:
            raise _unreachable(self._config, error) from error
        except openai.OpenAIError:
            pass  # Not every server lists its models. Other errors show with the first prompt.

    async def _work(self, client: Any, queue: Iterator[Prompt]) -> None:
        """Ask for one prompt after the other until the queue, which all workers share, is empty."""
        for prompt in queue:
            try:
                text, reason = await self._ask(client, prompt)
            except openai.APITimeoutError:
                self._failed(f"no answer within {self._config.timeout:g} s (--timeout)")
            except openai.APIConnectionError as error:
                raise _unreachable(self._config, error) from error
            except openai.APIStatusError as error:
                self._rejected(error)
            except (openai.OpenAIError, ValueError) as error:
                self._failed(f"the server's answer cannot be used: {_line(error)}")
            else:
                self._failed_in_a_row = 0
                # Servers of some tokenizers leave out the space before the first word.
                row = prompt.row(text, reason, verbatim=text[:1].isspace())
                self._answers.append({"id": prompt.id, **row})
                self._answered.add(prompt.id)
                self._bar.update()

    async def _ask(self, client: Any, prompt: Prompt) -> tuple[str, str | None]:
        """The greedy answer and why it ended. Raises ValueError for a reply that is no answer."""
        config = self._config
        endpoint = client.completions if config.completions else client.chat.completions
        reply = await endpoint.create(
            model=config.model,
            max_tokens=config.max_new_tokens,
            temperature=0,
            extra_body=config.extra_body or None,
            **prompt.body,
        )
        return _answer(reply)

    def _rejected(self, error: Any) -> None:
        """Note an error status. Raises TrainingError if all other prompts will get the same status."""
        status = error.status_code
        body = error.body if isinstance(error.body, dict) else {}
        reason = f"the server says {status}: {_line(body.get('message') or error.message)}"
        if status in REFUSED or status in TRANSIENT or status >= 500:
            self._failed(reason, refused=status in REFUSED)
            return
        hint = " (is it served under the name --model, and does --base-url end in /v1?)" * (status == 404)
        raise TrainingError(f"--base-url: {self._config.base_url}: {reason}{hint}")

    def _failed(self, reason: str, *, refused: bool = False) -> None:
        """Note a prompt without an answer. Raises TrainingError after too many in a row."""
        self.failures.append(reason)
        self._bar.set_postfix(failed=len(self.failures))
        # Many prompts in a row may be too long, so rejections count only until the first answer.
        self._failed_in_a_row += not (refused and self._answered)
        if self._failed_in_a_row >= MAX_FAILURES_IN_A_ROW + self._config.concurrency:
            raise TrainingError(
                f"--base-url: {self._config.base_url}: {self._failed_in_a_row} prompts in a row failed, "
                f"the last one because {reason}"
            )


def _unreachable(config: DistillConfig, error: BaseException) -> TrainingError:
    cause = error.__cause__ or error
    return TrainingError(f"--base-url: {config.base_url} cannot be reached: {_line(cause)}")


def _answer(reply: Any) -> tuple[str, str | None]:
    """Text and finish reason of a reply, which may be any JSON. Raises ValueError if it is no answer."""
    try:
        choice = reply.choices[0]
        text = choice.message.content if hasattr(choice, "message") else choice.text
        reason = choice.finish_reason
    except (AttributeError, IndexError, TypeError):
        raise ValueError("it is no completion") from None
    message = getattr(choice, "message", None)
    if getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None):
        raise ValueError("its thoughts are apart from its text: start the server without a reasoning parser")
    if not isinstance(text, str):
        raise ValueError("it holds no text")
    text.encode("utf-8")  # JSON can hold lone surrogates, which cannot be written as UTF-8.
    return text, reason


def _line(value: Any) -> str:
    """An error in one short line."""
    return " ".join(str(value).split())[:300] or type(value).__name__
