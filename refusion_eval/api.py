"""The Python interface: load a checkpoint, decode prompts with any decoder, score texts.

Example:
    model = refusion_eval.load_model("GSAI-ML/ReFusion")
    out = refusion_eval.generate(model, prompt_ids, decoder="refusion", gen_length=512)
    out.tokens, out.num_forwards, out.seconds, out.trace
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from refusion_eval.config import check_keys
from refusion_eval.decoders import DECODERS, Decoder, find_decoder, fitting_decoders
from refusion_eval.decoders.gap_length import holes
from refusion_eval.decoders.infilling import asks_by_fim, check_infilling, fitted, lengths, of_gap, over_gap, with_steps
from refusion_eval.decoders.thoughts import has_budget, parts, within_budget
from refusion_eval.engine.engine import Request
from refusion_eval.engine.scoring import MaskedReading, TokenScore, estimate_many, score_many
from refusion_eval.engine.width import WidthCost
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.loading import LoadedModel as LoadedModel
from refusion_eval.loading import load_model as load_model
from refusion_eval.models.device import cpu_threads
from refusion_eval.types import HOLE, OPEN, Decode, Decoded, Decoding, Trace

R = TypeVar("R", bound=Decoded | DecodeError)

_LENGTHS_TRIED = 1024  # to find one for a message

# Token ids as users have them: an integer tensor or array may have the shape [L] or [1, L].
TokenIds = Sequence[int] | Tensor | npt.NDArray[np.integer]


def decoder_settings(model: LoadedModel, decoder: str | Decoder, made: Any = None, /, **settings: Any) -> Any:
    """Makes a decoder's settings from fields of its settings class, and checks that they fit the checkpoint.

    Mask and EOS ids and the block length that are not given are the checkpoint's, if its files say them, and `fuse` is
    False: the paper's algorithm.

    Args:
        made: settings that exist already, which are checked and returned.

    Raises:
        ConfigError: unknown decoder or setting, a value out of range, or a mask token is needed and there is none.
    """
    settings_class, name = find_decoder(decoder).Settings, _name_of(decoder)
    fields = [field.name for field in dataclasses.fields(settings_class)]
    if made is not None and (settings or not isinstance(made, settings_class)):
        raise ConfigError(f"settings of {name}: give fields, or one {settings_class.__name__}")
    check_keys(settings, fields, name, what="setting")
    mask_id = settings.get("mask_id") if made is None else getattr(made, "mask_id", None)
    check_fit(model, decoder, mask_id is not None)
    defaults = {name: value for name, value in {**model.card.settings, "fuse": False}.items() if name in fields}
    resolved = settings_class(**defaults | settings) if made is None else made
    single = (getattr(resolved, name, None) for name in ("mask_id", "expand_id"))
    ids = (*getattr(resolved, "eos_ids", ()), *(token for token in single if token is not None))
    if any(not 0 <= token < model.config.vocab_size for token in ids):
        most = model.config.vocab_size - 1
        raise ConfigError(f"EOS, mask and expand ids {list(ids)} must lie in the vocabulary, 0..{most}")
    if has_budget(resolved):
        num_positions(model, resolved)  # refuses a budget that does not fit the template or the other settings
    return resolved


def settings_for(model: LoadedModel, decoder: str | Decoder, prompt: Sequence[int], given: Mapping[str, Any]) -> Any:
    """The settings with which `generate` decodes token ids: of fields that are given, fitted to a gap if there is one.

    Raises:
        ConfigError: as `decoder_settings`, or `gen_length` is given for a gap, which has its own length.
    """
    if HOLE not in prompt:
        return decoder_settings(model, decoder, **given)
    chosen = of_gap(find_decoder(decoder), prompt, given)
    steps = chosen.pop("steps", None)
    if not isinstance(steps, int) or steps < 1:
        return decoder_settings(model, decoder, **chosen, **({} if steps is None else {"steps": steps}))
    return with_steps(
        lambda steps: decoder_settings(model, decoder, **chosen, steps=steps), steps, chosen["gen_length"]
    )


def decode_of(model: LoadedModel, decoder: str | Decoder, settings: Any, prompt: Sequence[int]) -> Decode:
    """The function that decodes a prompt: that of the decoder, around a gap, or within a budget of thoughts."""
    if HOLE in prompt:
        entry = find_decoder(decoder)
        return over_gap(entry, lambda: model.tokenizer.fim_ids, lambda: model.tokenizer.inner.bos_token_id)
    decode = find_decoder(decoder).decode
    return within_budget(decode, model.tokenizer.end_of_thought) if has_budget(settings) else decode


def num_positions(model: LoadedModel, settings: Any, prompt_length: int | None = None) -> int:
    """Positions after a prompt that decoding may touch, those of the tokens that end a thought included.

    They are exact for a prompt of a given length, without a budget of thoughts; else an upper bound for any prompt.
    """
    num_own: int = settings.num_positions
    if not has_budget(settings):
        is_bound = prompt_length is None or not hasattr(settings, "positions_after")
        return num_own if is_bound else int(settings.positions_after(prompt_length))
    most_forced = len(model.tokenizer.end_of_thought((), ()))  # those of an empty thought
    try:
        *_, answer = parts(settings)
    except ConfigError as error:
        rule = f"a thought and an answer of {settings.gen_length - settings.thought_budget} tokens are refused"
        raise ConfigError(f"thought_budget={settings.thought_budget}: {rule} ({error})") from error
    return max(num_own, settings.thought_budget + answer.num_positions) + most_forced


def _name_of(decoder: str | Decoder) -> str:
    return decoder.label if isinstance(decoder, Decoder) else decoder


def check_fit(model: LoadedModel, decoder: str | Decoder, mask_id_given: bool) -> None:
    """Refuses a decoder of this project for a checkpoint or adapter of another kind, and any without its mask token."""
    name, fits = _name_of(decoder), model.decoders
    if decoder in DECODERS and model.card.refused:
        raise ConfigError(f"{model.name}: {model.card.refused}")
    if model.adapter is not None and find_decoder(decoder).adapts_masks_only:
        rows = "an adapter is merged into all rows, and its release applies one to the rows of masks only"
        raise ConfigError(f"decoder={name}: {rows}, which is not computed; leave out adapter={model.adapter}")
    has_mask = model.card.mask_id is not None or mask_id_given
    # With a mask token of the user's a causal checkpoint counts as trained to fill masks.
    if mask_id_given and fits == fitting_decoders("causal"):
        fits = fitting_decoders("masked")
    if decoder in DECODERS and decoder not in fits:
        obstacle, advice = "", f'write "decoders": ["{name}"] into its config.json if it was trained for that'
        if not has_mask:
            obstacle = ": it has no mask token"
            advice = "give the mask token's id as mask_id if it was trained with one"
        raise ConfigError(
            f"{model.name} ({model.config.family}) does not fit decoder={name}{obstacle}; it fits {', '.join(fits)}: "
            f"take one of these, or another checkpoint, or {advice}"
        )
    if find_decoder(decoder).reads.masked is not None and not has_mask:
        raise ConfigError(f"decoder={name} needs a mask token and {model.name} names none; give its id as mask_id")


def with_width_cost(settings: Any, width_cost: Callable[[], WidthCost]) -> Any:
    """Fills in the measured costs of forwards, by which a decoder fuses them, where the settings leave them open."""
    if not needs_width_cost(settings):
        return settings
    measured = width_cost()  # takes seconds where it is not shipped
    free_rows = measured.free_rows if settings.free_rows is None else settings.free_rows
    return dataclasses.replace(settings, free_rows=free_rows, row_cost=measured.row_cost)


def needs_width_cost(settings: Any) -> bool:
    return getattr(settings, "fused", False) and settings.row_cost is None


def check_request(model: LoadedModel, decoder: str | Decoder, prompt_ids: TokenIds, settings: Any) -> list[int]:
    """Token ids of a prompt; ConfigError, before anything is computed, if it or its gap is unfit."""
    prompt = _token_ids(model, prompt_ids, with_holes=True)
    if HOLE not in prompt:
        num_tokens = len(prompt)
        return check_prompt(
            model, prompt, num_positions(model, settings, num_tokens), lambda: _longest(model, settings, num_tokens)
        )
    entry = find_decoder(decoder)
    check_infilling(_name_of(decoder), entry, prompt, lambda: model.tokenizer.fim_ids)
    for num_tokens in lengths(prompt):
        fitted(settings, num_tokens)  # refuses settings that do not fit the gap
    if set(prompt) <= {HOLE, OPEN}:
        raise ConfigError("the prompt is all gap; give at least one token id before or behind it")
    if len(prompt) + (3 if asks_by_fim(entry) else 0) > model.config.max_positions:
        length = f"a text of {len(prompt)} tokens exceeds the context of {model.config.max_positions}"
        raise ConfigError(f"{length}; shorten prefix, gap or suffix")
    return prompt


def _longest(model: LoadedModel, settings: Any, prompt_length: int) -> int:
    """The largest `gen_length` with which a prompt of a length fits into the context; 0 where none is found."""
    room = model.config.max_positions - prompt_length
    for gen_length in range(min(room, settings.gen_length - 1), max(0, room - _LENGTHS_TRIED), -1):
        with suppress(ConfigError, ValueError):  # blocks and steps may not fit a length
            shorter = dataclasses.replace(settings, gen_length=gen_length)
            if num_positions(model, shorter, prompt_length) <= room:
                return gen_length
    return 0


def check_prompt(
    model: LoadedModel, prompt_ids: TokenIds, num_positions: int, longest: Callable[[], int] = lambda: 0
) -> list[int]:
    """Token ids of a prompt with `num_positions` after it; ConfigError, before anything is computed, if it is unfit.

    Args:
        longest: tells the largest `gen_length` with which the prompt would fit, for the error; 0 if none is known.
    """
    prompt_ids = _token_ids(model, prompt_ids)
    if not prompt_ids:
        raise ConfigError("the prompt is empty; give at least one token id")
    max_positions = model.config.max_positions
    if len(prompt_ids) + num_positions > max_positions:
        length = f"prompt of {len(prompt_ids)} tokens and {num_positions} generated positions"
        fitting = longest()
        advice = f", or lower gen_length to {fitting}" if fitting else ""
        raise ConfigError(f"{length} exceed the context of {max_positions}; shorten the prompt{advice}")
    return prompt_ids


def generate(
    model: LoadedModel,
    prompt_ids: TokenIds | str,
    decoder: str | Decoder = "refusion",
    *,
    suffix: TokenIds | str | None = None,
    gap_tokens: int | tuple[int, int] | None = None,
    **settings: Any,
) -> Decoded:
    """Decodes one prompt, or fills the gap between a prefix and a suffix.

    Args:
        prompt_ids: token ids, at least one: integers, or an integer tensor or array of shape [L] or [1, L]. A string is
            wrapped as a user message if the checkpoint has a chat template; otherwise it is a prefix to continue.
        decoder: name of a decoder, FILE.py:DECODER or MODULE:DECODER for your own, or a `Decoder`; `settings` are the
            fields of its settings class.
        suffix: what stands behind the gap, token ids or text; the prompt is then a prefix, and as a text it is encoded
            without a chat template. Token ids may have -1 for each token that is to be found instead, anywhere.
        gap_tokens: number of tokens between prefix and suffix, >= 1; it takes the place of `gen_length`. With a pair
            (first, longest) the number is searched, from the first one on, in forwards that count
            (`refusion_eval.decoders.gap_length`); published are (8, 64). A model that reads from left to right ends by
            itself, and then `longest` bounds it.

    Returns:
        Tokens, why decoding ended, number of forwards, seconds and trace; for a text also the response as text. Those
        of a gap end with the first of `eos_ids`, too; with `eos_ids=()` they are all.

    Raises:
        ConfigError: the prompt or a setting is refused, before anything is computed.
        DecodeError: decoding failed.
    """
    ids = around_gap(model, prompt_ids, suffix, gap_tokens)
    request = _request(model, decoder, ids, settings_for(model, decoder, ids, settings))
    return _with_text(model, prompt_ids, model.engine.run(request.decode, request.prompt, request.settings))


def around_gap(
    model: LoadedModel,
    prefix: TokenIds | str,
    suffix: TokenIds | str | None,
    gap_tokens: int | tuple[int, int] | None,
) -> list[int]:
    """Token ids of a prompt as `generate` takes it: with so many holes between prefix and suffix, if there is one.

    Raises:
        ConfigError: ids or number of tokens are refused.
    """
    if suffix is None:
        if gap_tokens is not None:
            raise ConfigError(f"gap_tokens={gap_tokens} without a suffix; give one, or gen_length")
        return _token_ids(model, _ids_of(model, prefix), with_holes=True)
    numbers: list[Any] = list(gap_tokens) if isinstance(gap_tokens, tuple | list) else [gap_tokens]
    are_numbers = all(isinstance(number, int) and number > 0 for number in numbers)
    if not are_numbers or len(numbers) not in (1, 2) or numbers != sorted(set(numbers)):
        raise ConfigError(
            f"gap_tokens={gap_tokens}; give the number of tokens between prefix and suffix, 1 or more, or a pair of "
            "the first number that a search tries and a larger one, the largest"
        )
    before = model.tokenizer.encode(prefix, plain=True) if isinstance(prefix, str) else _token_ids(model, prefix)
    behind = model.tokenizer.encode(suffix) if isinstance(suffix, str) else _token_ids(model, suffix)
    return [*before, *holes(*numbers), *behind]


def _ids_of(model: LoadedModel, prompt: TokenIds | str) -> TokenIds:
    if not isinstance(prompt, str):
        return prompt
    tokenizer = model.tokenizer
    if not tokenizer.inner.chat_template:
        return tokenizer.encode(prompt, plain=True)
    return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": prompt}]))


def _with_text(model: LoadedModel, prompt: TokenIds | str, result: R) -> R:
    if not isinstance(prompt, str) or not isinstance(result, Decoded):
        return result
    return dataclasses.replace(result, text=model.tokenizer.decode(result.tokens))


def generate_stream(
    model: LoadedModel, requests: Iterable[tuple[str | Decoder, TokenIds, Any]], batch_size: int
) -> Iterator[tuple[int, Decoded | DecodeError]]:
    """Decodes many prompts with continuous batching and yields each result when it is ready.

    Args:
        requests: tuples (decoder, prompt ids, settings from `decoder_settings`), consumed as requests are admitted.
            These settings are fitted to a gap by their shares; `settings_for` makes those that `generate` has.
        batch_size: largest number of requests at once, >= 1.

    Yields:
        (index of the request, its result or the error that ended it); a request that is refused ends no other.

    Raises:
        ConfigError: batch_size is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}; it must be at least 1")

    def checked() -> Iterator[Request]:
        for decoder, prompt_ids, settings in requests:
            try:
                yield _request(model, decoder, prompt_ids, settings)
            except ConfigError as error:
                yield Request(_refuse, (), error)

    return model.engine.run_many(checked(), batch_size)


def _request(model: LoadedModel, decoder: str | Decoder, prompt_ids: TokenIds, settings: Any) -> Request:
    entry = find_decoder(decoder)
    if not isinstance(settings, entry.Settings):
        kind = type(settings).__name__
        raise ConfigError(f"settings of {_name_of(decoder)} are {kind}; make them with decoder_settings")
    prompt = check_request(model, decoder, prompt_ids, settings)
    decode = decode_of(model, decoder, settings, prompt)
    return Request(decode, prompt, with_width_cost(settings, lambda: model.width_cost))


def _refuse(prompt: Sequence[int], settings: ConfigError, trace: Trace) -> Decoding:
    # A refused request is decoded too, by this decoder, so that its error comes out like that of any other.
    raise DecodeError(f"the request is refused: {settings}") from settings
    yield  # which makes this function a generator


def generate_many(
    model: LoadedModel,
    prompts: Sequence[TokenIds | str],
    decoder: str | Decoder = "refusion",
    batch_size: int = 16,
    *,
    suffixes: Sequence[TokenIds | str] | None = None,
    gap_tokens: int | tuple[int, int] | None = None,
    **settings: Any,
) -> list[Decoded]:
    """Decodes many prompts with continuous batching; returns one result for each prompt, in their order.

    Args:
        prompts: token ids or text of each prompt, as in `generate`.
        suffixes: what stands behind the gap of each prompt; `gap_tokens` is that of all gaps, as in `generate`.
        batch_size: largest number of requests at once, >= 1; in float32 it does not change the tokens.

    Raises:
        ConfigError: a prompt or a setting is refused; nothing was computed.
        DecodeError: prompts could not be decoded. All others were; `results` has the result or error of each prompt.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is one text; give a list of texts, or call generate")
    prompts = list(prompts)
    if isinstance(suffixes, str) or (suffixes is not None and len(suffixes) != len(prompts)):
        raise ConfigError(f"suffixes are {len(suffixes)} for {len(prompts)} prompts; give a list with one for each")
    requests, without_gap = [], None
    for number, prompt in enumerate(prompts):
        try:
            ids = around_gap(model, prompt, None if suffixes is None else suffixes[number], gap_tokens)
            if without_gap is None and HOLE not in ids:
                without_gap = decoder_settings(model, decoder, **settings)
            resolved = settings_for(model, decoder, ids, settings) if HOLE in ids else without_gap
            requests.append((decoder, check_request(model, decoder, ids, resolved), resolved))
        except ConfigError as error:
            raise ConfigError(f"prompt {number} (from 0): {error}") from error
    by_index = dict(generate_stream(model, requests, batch_size))
    results = [_with_text(model, prompt, by_index[index]) for index, prompt in enumerate(prompts)]
    failed = [index for index, result in enumerate(results) if isinstance(result, DecodeError)]
    if failed:
        first = f"the first of them number {failed[0]} (from 0): {results[failed[0]]}"
        failure = DecodeError(f"{len(failed)} of {len(results)} prompts could not be decoded, {first}; see `results`")
        failure.results = results
        raise failure
    return [result for result in results if isinstance(result, Decoded)]


def score_tokens(
    model: LoadedModel, prefix_ids: TokenIds, continuation_ids: TokenIds, mc_samples: int = 128, seed: int = 0
) -> TokenScore:
    """Log-likelihood of one continuation; as `score_tokens_many`."""
    return score_tokens_many(model, [(prefix_ids, continuation_ids)], 1, mc_samples, seed)[0]


def score_tokens_many(
    model: LoadedModel,
    pairs: Sequence[tuple[TokenIds, TokenIds]],
    batch_size: int = 16,
    mc_samples: int = 128,
    seed: int = 0,
) -> list[TokenScore]:
    """Log-likelihoods of continuations, computed in the way that the checkpoint was trained for.

    For checkpoints that read from left to right, including ReFusion, they are exact. For LLaDA and Dream they are
    estimates of a lower bound, see `refusion_eval.engine.scoring`.

    Args:
        pairs: (prefix, continuation) token ids, as in `generate`; neither may be empty.
        batch_size: pairs computed together, >= 1; it changes no score.
        mc_samples: noised copies of each continuation in an estimate, >= 1.
        seed: seed of the noise, >= 0; the noise of a pair depends on its tokens and the seed only.

    Returns:
        Log-likelihood in nats, and whether greedy decoding would give the continuation, one for each pair.

    Raises:
        ConfigError: a pair or a number is refused, or no log-likelihood is computed for this kind of checkpoint.
    """
    for name, value, low in (("batch_size", batch_size, 1), ("mc_samples", mc_samples, 1), ("seed", seed, 0)):
        if value < low:
            raise ConfigError(f"scoring: {name}={value}; it must be at least {low}")
    longest = longest_scored(model)
    read = [(_token_ids(model, prefix), _token_ids(model, continuation)) for prefix, continuation in pairs]
    for prefix_ids, continuation_ids in read:
        if not prefix_ids or not continuation_ids:
            raise ConfigError("scoring needs at least one prefix token and one continuation token")
        if (num_tokens := len(prefix_ids) + len(continuation_ids)) > longest:
            raise ConfigError(f"a text of {num_tokens} tokens cannot be scored; {model.name} takes at most {longest}")
    shift = _logit_shift(model)
    if shift is None:
        with cpu_threads(model.num_threads):
            return score_many(model.engine.model, read, batch_size)
    if model.card.mask_id is None:
        raise ConfigError(f"{model.name} names no mask token; give its id as mask_token_id in its config.json")
    reading = MaskedReading(mask_id=model.card.mask_id, shift=shift, num_samples=mc_samples, seed=seed)
    with cpu_threads(model.num_threads):
        return estimate_many(model.engine.model, read, batch_size, reading)


def longest_scored(model: LoadedModel) -> int:
    """Largest number of tokens of a prefix and a continuation together; ConfigError for an unscored kind of model."""
    # If the model reads from left to right, the last token is only predicted and needs no position.
    return model.config.max_positions + (1 if _logit_shift(model) is None else 0)


def _logit_shift(model: LoadedModel) -> int | None:
    """Rows between a masked position and the row that predicts it; None for a model that reads from left to right."""
    if model.is_stock:
        raise ConfigError("log-likelihoods are not computed with backend=transformers; lm-eval's own is `--model hf`")
    fits = [DECODERS[name].reads for name in model.decoders if name in DECODERS]
    if fits and fits[0].mask_shift is not None:
        return fits[0].mask_shift
    if any(reads.left_to_right for reads in fits):
        return None
    all_reads = {name: entry.reads for name, entry in DECODERS.items()}
    scored = [name for name, reads in all_reads.items() if reads.left_to_right or reads.mask_shift is not None]
    trained = f"{model.name} was trained for {model.decoders[0]}"
    raise ConfigError(f"{trained}, for which no log-likelihood is computed; there is one for {', '.join(scored)}")


def _token_ids(model: LoadedModel, given: Any, *, with_holes: bool = False) -> list[int]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        advice = "its input_ids" if isinstance(given, Mapping) else "integers, as model.tokenizer.encode makes them"
        raise ConfigError(f"token ids are of the type {type(given).__name__}; give {advice}")
    listed = given.tolist() if hasattr(given, "tolist") else list(given)
    listed = listed if isinstance(listed, list) else [listed]  # of a tensor without a dimension
    tokens = [token.tolist() if hasattr(token, "tolist") else token for token in listed]
    if any(isinstance(token, list | tuple) for token in tokens):
        if len(tokens) > 1:
            raise ConfigError(f"token ids are {len(tokens)} rows; give each as a prompt of its own")
        return _token_ids(model, tokens[0], with_holes=with_holes)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"token id {token!r} is not an integer; give those that model.tokenizer.encode makes")
        if not (0 <= token < model.config.vocab_size or (with_holes and token in (HOLE, OPEN))):
            raise ConfigError(f"token {token} lies outside the vocabulary, 0..{model.config.vocab_size - 1}")
    return tokens
