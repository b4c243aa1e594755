"""The little world the choice tasks ask about: relations (entity -> value) and kinds (kind -> members)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Relation:
    """One relation of the mmlu_pro look-alike.

    Attributes:
        category: the MMLU-Pro category it stands in for.
        statement: the sentence about `{entity}` that the value ends.
        phrasings: questions with `{entity}`.
        facts: entity -> value; values are distinct.
    """

    category: str
    statement: str
    phrasings: tuple[str, ...]
    facts: dict[str, str]


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split(", "))


RELATIONS: tuple[Relation, ...] = (
    Relation(
        category="chemistry",
        statement="The symbol of {entity} is",
        phrasings=(
            "What is the chemical symbol of {entity}?",
            "Which symbol stands for the element {entity}?",
            "The element {entity} is written as which symbol?",
            "In the periodic table {entity} has which symbol?",
        ),
        facts=_pairs(
            "iron:Fe, gold:Au, silver:Ag, copper:Cu, lead:Pb, tin:Sn, sodium:Na, helium:He, zinc:Zn, neon:Ne, "
            "calcium:Ca, nickel:Ni"
        ),
    ),
    Relation(
        category="other",
        statement="The capital of {entity} is",
        phrasings=(
            "What is the capital of {entity}?",
            "Which city is the capital of {entity}?",
            "The government of {entity} sits in which city?",
            "Name the capital city of {entity}.",
        ),
        facts=_pairs(
            "France:Paris, Japan:Tokyo, Italy:Rome, Spain:Madrid, Egypt:Cairo, Peru:Lima, Kenya:Nairobi, Norway:Oslo, "
            "Greece:Athens, Cuba:Havana, Poland:Warsaw, Canada:Ottawa"
        ),
    ),
    Relation(
        category="physics",
        statement="The unit of {entity} is the",
        phrasings=(
            "What is the SI unit of {entity}?",
            "Which unit measures {entity}?",
            "In which unit is {entity} given?",
            "A value of {entity} carries which unit?",
        ),
        facts=_pairs(
            "force:newton, energy:joule, power:watt, pressure:pascal, charge:coulomb, voltage:volt, resistance:ohm, "
            "frequency:hertz, temperature:kelvin, mass:kilogram, current:ampere, length:meter"
        ),
    ),
    Relation(
        category="biology",
        statement="The subject of {entity} is",
        phrasings=(
            "What is the subject of {entity}?",
            "What does {entity} study?",
            "A course in {entity} is about what?",
            "Experts in {entity} work on what?",
        ),
        facts=_pairs(
            "botany:plants, zoology:animals, ornithology:birds, entomology:insects, mycology:fungi, ichthyology:fish, "
            "genetics:genes, cytology:cells, virology:viruses, osteology:bones, phycology:algae, neurology:nerves"
        ),
    ),
    Relation(
        category="health",
        statement="In {entity} the inflamed part is the",
        phrasings=(
            "Which part of the body is inflamed in {entity}?",
            "A patient with {entity} has an inflamed what?",
            "Which organ does {entity} affect?",
            "What is inflamed in a case of {entity}?",
        ),
        facts=_pairs(
            "hepatitis:liver, pneumonia:lung, nephritis:kidney, gastritis:stomach, dermatitis:skin, myocarditis:heart, "
            "encephalitis:brain, arthritis:joint, conjunctivitis:eye, otitis:ear, gingivitis:gum, colitis:colon"
        ),
    ),
    Relation(
        category="history",
        statement="The {entity} goes back to",
        phrasings=(
            "Who is known for the {entity}?",
            "The {entity} goes back to whom?",
            "Which person gave us the {entity}?",
            "To whom do we owe the {entity}?",
        ),
        facts=_pairs(
            "telephone:Bell, light bulb:Edison, radio:Marconi, dynamite:Nobel, printing press:Gutenberg, "
            "steam engine:Watt, first vaccine:Jenner, battery:Volta, theory of relativity:Einstein, "
            "theory of evolution:Darwin, laws of motion:Newton, discovery of radium:Curie"
        ),
    ),
    Relation(
        category="computer science",
        statement="The creator of {entity} is",
        phrasings=(
            "Who created {entity}?",
            "Who is the creator of {entity}?",
            "Which person designed {entity}?",
            "{entity} is the work of whom?",
        ),
        facts=_pairs(
            "Python:van Rossum, Java:Gosling, Linux:Torvalds, Perl:Wall, Ruby:Matsumoto, Lisp:McCarthy, Pascal:Wirth, "
            "Fortran:Backus, Unix:Thompson, Prolog:Colmerauer, TeX:Knuth, Scheme:Steele"
        ),
    ),
    Relation(
        category="philosophy",
        statement="The author of {entity} is",
        phrasings=(
            "Who wrote {entity}?",
            "Who is the author of {entity}?",
            "{entity} was written by whom?",
            "Which thinker is behind {entity}?",
        ),
        facts=_pairs(
            "the Republic:Plato, the Politics:Aristotle, Leviathan:Hobbes, Meditations:Aurelius, the Ethics:Spinoza, "
            "Monadology:Leibniz, Emile:Rousseau, Candide:Voltaire, Utopia:More, Walden:Thoreau"
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of thing of the arc_challenge look-alike.

    Attributes:
        name: with its article ("a mammal").
        clues: questions that describe the kind; with the common ones, the phrasings.
        members: things of this kind and of no other.
    """

    name: str
    clues: tuple[str, str]
    members: tuple[str, ...]


COMMON_CLUES = ("Which of these is {kind}?", "A student looks for {kind}. Which one should the student choose?")

KINDS: tuple[Kind, ...] = (
    Kind(
        name="a mammal",
        clues=("Which animal feeds milk to its young?", "Which animal has fur or hair?"),
        members=("whale", "dog", "bat", "horse", "lion", "rabbit"),
    ),
    Kind(
        name="a bird",
        clues=("Which animal has feathers?", "Which animal has a beak and two wings?"),
        members=("eagle", "owl", "penguin", "duck", "parrot", "robin"),
    ),
    Kind(
        name="a fish",
        clues=("Which animal breathes with gills?", "Which animal swims with fins?"),
        members=("salmon", "shark", "trout", "tuna", "carp", "eel"),
    ),
    Kind(
        name="an insect",
        clues=("Which animal has six legs?", "Which animal has a body in three parts?"),
        members=("ant", "bee", "beetle", "moth", "wasp", "fly"),
    ),
    Kind(
        name="a reptile",
        clues=("Which animal has dry scales?", "Which animal lays leathery eggs on land?"),
        members=("snake", "lizard", "turtle", "crocodile", "gecko", "iguana"),
    ),
    Kind(
        name="a metal",
        clues=("Which material conducts electricity well?", "Which material is shiny and can be bent?"),
        members=("iron", "copper", "gold", "silver", "zinc", "tin"),
    ),
    Kind(
        name="a gas",
        clues=("Which substance fills its whole container?", "Which substance has no fixed shape and no fixed volume?"),
        members=("oxygen", "helium", "nitrogen", "hydrogen", "neon", "argon"),
    ),
    Kind(
        name="a planet",
        clues=("Which object orbits the Sun?", "Which object would a probe visit in the solar system?"),
        members=("Mars", "Venus", "Jupiter", "Saturn", "Neptune", "Uranus"),
    ),
    Kind(
        name="a liquid",
        clues=("Which substance can be poured into a cup?", "Which substance has a fixed volume but no fixed shape?"),
        members=("water", "milk", "oil", "juice", "vinegar", "syrup"),
    ),
    Kind(
        name="a plant part",
        clues=("Which one grows on a tree?", "Which one would a botanist draw?"),
        members=("root", "stem", "leaf", "flower", "seed", "bark"),
    ),
)
