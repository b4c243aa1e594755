"""A script that checks the instructions of IFEval by lm-eval's code: it reads lines `[row, text, rule]`.

For each it writes whether the text follows each instruction of the row, a list of true and false, under the rule
"strict" or "loose".
"""

import json
import logging
import random
import resource
import sys
import tempfile
from pathlib import Path

# NLTK imports these where they are installed, which takes seconds, for parts that no instruction is checked by. They
# are hidden from this process alone, so NLTK is imported only after that.
_HIDDEN = ("scipy", "sklearn")
_MEMORY_BYTES = 4 << 30


def provide_sentence_model(folder: str) -> None:
    """Writes NLTK's model of English sentences, which NLTK itself only downloads, unless it is installed already."""
    import nltk
    from nltk.tokenize.punkt import PunktParameters, save_punkt_params
    from punkt.data import english

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        parameters = PunktParameters()
        parameters.abbrev_types = set(english.ABBREV_TYPES)
        parameters.sent_starters = set(english.SENT_STARTERS)
        parameters.collocations = set(english.COLLOCATIONS)
        parameters.ortho_context.update(english.ORTHO_CONTEXT)
        nltk.data.path.append(folder)
        target = Path(folder) / "tokenizers" / "punkt_tab" / "english"
        target.mkdir(parents=True, mode=0o700)
        save_punkt_params(parameters, str(target))


def main() -> None:
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for name in _HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]
    import nltk
    from langdetect import DetectorFactory

    with tempfile.TemporaryDirectory(prefix="refusion_eval_nltk_") as folder:
        provide_sentence_model(folder)
        from lm_eval.tasks.ifeval import instructions_util, utils  # looks for the model when it is imported

        # Both ways to it read it once and keep it, so that its files go before this process is killed.
        instructions_util.count_sentences("One. Two.")
        nltk.word_tokenize("One.")
    rules = {"strict": utils.test_instruction_following_strict, "loose": utils.test_instruction_following_loose}
    for line in sys.stdin:
        row, text, rule = json.loads(line)
        # The detector of languages draws at random, and so does a check whose row leaves an argument out.
        DetectorFactory.seed = 0
        random.seed(0)
        names = ("key", "prompt", "instruction_id_list", "kwargs")
        example = utils.InputExample(**{name: row[name] for name in names})
        followed = rules[rule](example, text).follow_instruction_list
        sys.stdout.write(json.dumps(list(map(bool, followed))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
