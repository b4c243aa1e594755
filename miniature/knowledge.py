"""The little world of the mini tasks: persons, things, relations (entity -> value) and kinds (kind -> members)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Relation:
    """One relation of the mmlu_pro look-alike.

    Attributes:
        category: the MMLU-Pro category it stands in for.
        statement: the sentence about `{entity}` that the value ends.
        facts: entity -> value; values are distinct.
    """

    category: str
    statement: str
    facts: dict[str, str]


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split(", "))


NAMES = ("Tom", "Anna", "Ben", "Lucy", "Max", "Sara", "Leo", "Nina", "Paul", "Ella", "Omar", "Rosa")
THINGS = ("pens", "books", "coins", "cards", "eggs", "apples", "stamps", "shells", "stones", "plums", "cups", "balls")

RELATIONS: tuple[Relation, ...] = (
    Relation(
        category="chemistry",
        statement="The symbol of {entity} is",
        facts=_pairs(
            "iron:Fe, gold:Au, silver:Ag, copper:Cu, lead:Pb, tin:Sn, sodium:Na, helium:He, zinc:Zn, neon:Ne, "
            "calcium:Ca, nickel:Ni"
        ),
    ),
    Relation(
        category="other",
        statement="The capital of {entity} is",
        facts=_pairs(
            "France:Paris, Japan:Tokyo, Italy:Rome, Spain:Madrid, Egypt:Cairo, Peru:Lima, Kenya:Nairobi, Norway:Oslo, "
            "Greece:Athens, Cuba:Havana, Poland:Warsaw, Canada:Ottawa"
        ),
    ),
    Relation(
        category="physics",
        statement="The unit of {entity} is the",
        facts=_pairs(
            "force:newton, energy:joule, power:watt, pressure:pascal, charge:coulomb, voltage:volt, resistance:ohm, "
            "frequency:hertz, temperature:kelvin, mass:kilogram, current:ampere, length:meter"
        ),
    ),
    Relation(
        category="biology",
        statement="The subject of {entity} is",
        facts=_pairs(
            "botany:plants, zoology:animals, ornithology:birds, entomology:insects, mycology:fungi, ichthyology:fish, "
            "genetics:genes, cytology:cells, virology:viruses, osteology:bones, phycology:algae, neurology:nerves"
        ),
    ),
    Relation(
        category="health",
        statement="In {entity} the inflamed part is the",
        facts=_pairs(
            "hepatitis:liver, pneumonia:lung, nephritis:kidney, gastritis:stomach, dermatitis:skin, myocarditis:heart, "
            "encephalitis:brain, arthritis:joint, conjunctivitis:eye, otitis:ear, gingivitis:gum, colitis:colon"
        ),
    ),
    Relation(
        category="history",
        statement="The {entity} goes back to",
        facts=_pairs(
            "telephone:Bell, light bulb:Edison, radio:Marconi, dynamite:Nobel, printing press:Gutenberg, "
            "steam engine:Watt, first vaccine:Jenner, battery:Volta, theory of relativity:Einstein, "
            "theory of evolution:Darwin, laws of motion:Newton, discovery of radium:Curie"
        ),
    ),
    Relation(
        category="computer science",
        statement="The creator of {entity} is",
        facts=_pairs(
            "Python:van Rossum, Java:Gosling, Linux:Torvalds, Perl:Wall, Ruby:Matsumoto, Lisp:McCarthy, Pascal:Wirth, "
            "Fortran:Backus, Unix:Thompson, Prolog:Colmerauer, TeX:Knuth, Scheme:Steele"
        ),
    ),
    Relation(
        category="philosophy",
        statement="The author of {entity} is",
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
        members: things of this kind and of no other.
    """

    name: str
    members: tuple[str, ...]


_MEMBERS = {
    "a mammal": "whale dog bat horse lion rabbit",
    "a bird": "eagle owl penguin duck parrot robin",
    "a fish": "salmon shark trout tuna carp eel",
    "an insect": "ant bee beetle moth wasp fly",
    "a reptile": "snake lizard turtle crocodile gecko iguana",
    "a metal": "iron copper gold silver zinc tin",
    "a gas": "oxygen helium nitrogen hydrogen neon argon",
    "a planet": "Mars Venus Jupiter Saturn Neptune Uranus",
    "a liquid": "water milk oil juice vinegar syrup",
    "a plant part": "root stem leaf flower seed bark",
}
KINDS = tuple(Kind(name=name, members=tuple(members.split())) for name, members in _MEMBERS.items())
