# ruff: noqa: E501  (one thing of the table is one line)
"""The small world of the demo: 72 things in nine groups, each with one use and five true facts.

A fact is a predicate: "The saw" + "has a blade with sharp teeth". A thing's use is a fact too: "is good for cutting
boards". No predicate holds the name of a thing of the world and none contains another, so the judge (gold.py) finds
facts and names by plain text; tests/demo checks both.
"""

from dataclasses import dataclass

# group: name | use | five predicates. A name that begins with "the" is written with its article inside a sentence.
_TABLE = {
    "animal": """
the dog|guarding a house|barks at strangers; wags its tail when happy; smells better than people; comes from the wolf; likes to chase a ball
the cat|catching mice|purrs when it feels calm; can see in dim light; washes its fur with its tongue; sleeps many hours; often lands on its feet
the horse|riding across fields|eats grass and hay; can sleep standing up; wears iron shoes; runs on four hooves; has a baby called a foal
the cow|giving milk|chews its food again; has a stomach with four parts; has a baby called a calf; moos in the barn; gives us leather
the sheep|giving wool|follows the flock; is shorn every year; has a baby called a lamb; is led by a shepherd; grazes on green hills
the camel|crossing the desert|stores fat in its hump; can live days without water; closes its nose against sand; has long eyelashes; spits when it is angry
the bee|making honey|has six legs; carries pollen between flowers; lives in a hive with a queen; dances to show the way; can sting an enemy
the elephant|carrying heavy logs|is the largest land animal; lifts things with its trunk; has tusks of ivory; flaps its big ears; never eats meat""",
    "country": """
Japan|seeing temples|lies on islands in Asia; has Tokyo as its capital; has very fast trains; has many earthquakes; is famous for sushi
Egypt|seeing old pyramids|lies in the north of Africa; has Cairo as its capital; is crossed by the Nile; was ruled by pharaohs; is mostly dry sand
Brazil|seeing rain forest|is the largest in South America; has Brasilia as its capital; speaks Portuguese; holds a great carnival; grows the most coffee
Canada|seeing maple leaves|has Ottawa as its capital; speaks English and French; has the longest coast; has cold snowy winters; plays a lot of hockey
Italy|seeing Roman ruins|has the shape of a boot; has Rome as its capital; is the home of opera; lies in the south of Europe; has the leaning tower
India|seeing marble palaces|has New Delhi as its capital; has over a billion people; is known for spicy curry; is crossed by the Ganges; has a festival of lights
Kenya|seeing a safari|lies on the equator; has Nairobi as its capital; has great long distance runners; speaks Swahili; sells much black tea
Iceland|seeing northern lights|has Reykjavik as its capital; has hot springs and geysers; has many volcanoes; was settled by Vikings; has almost no trees""",
    "food": """
the apple|baking a pie|grows in orchards; has seeds in its core; can be red or green; is pressed into cider; keeps well all winter
the banana|a quick snack|grows in warm tropical lands; turns from green to yellow; is rich in potassium; must be peeled first; hangs in big bunches
the carrot|a crunchy salad|is an orange root; grows under the ground; is rich in vitamin A; was once purple; can be eaten raw
the lemon|making cold drinks|tastes very sour; is rich in vitamin C; has a yellow peel; keeps cut fruit from browning; grows on thorny branches
bread|making a sandwich|is baked in an oven; is made from flour and water; rises because of yeast; has a brown crust; becomes toast when heated
rice|feeding many people|grows in flooded fields; is boiled or steamed; is a small white grain; is planted by hand in places; feeds half of the world
cheese|melting on pizza|is made from milk; can have holes inside; ripens in cool cellars; gets stronger with age; is shaped into round wheels
chocolate|a sweet gift|is made from cocoa beans; melts in a warm hand; was first a bitter drink; is not safe for pets; can be dark or white""",
    "planet": """
Mercury|studying craters|is the nearest to the Sun; is the smallest planet; needs 88 days for a year; has no moon at all; has almost no air
Venus|studying thick clouds|is the hottest planet; spins backwards; has a day longer than its year; has no moon at all; shines as the evening star
Earth|keeping life alive|is our own home; is covered mostly by oceans; has one moon; turns once in 24 hours; has air we can breathe
Mars|testing rovers|is red because of rust; has the tallest volcano; has two small moons; has ice at its poles; is named after a god of war
Jupiter|studying giant storms|is the largest planet; has a great red spot; is made mostly of gas; turns once in ten hours; has four moons found by Galileo
Saturn|studying bright rings|could float on water; has the most known moons; has a moon called Titan; has bands of ice and rock; needs 29 years for a year
Uranus|studying a tilted world|rolls around on its side; was found by Herschel; looks pale blue green; has moons from Shakespeare; needs 84 years for a year
Neptune|studying fast winds|is the farthest from the Sun; was found with mathematics; has a moon called Triton; looks deep blue; is named after a sea god""",
    "tool": """
the hammer|driving nails|has a heavy steel head; pulls nails out with a claw; is swung from the elbow; can break stone; hits harder with a long handle
the saw|cutting boards|has a blade with sharp teeth; moves forward and back; leaves fine dust behind; gets hot from friction; cuts along a pencil line
the drill|making round holes|turns a sharp bit; often runs on a battery; calls for safety glasses; can work in concrete; was once turned by hand
the screwdriver|turning screws|has a flat or crossed tip; fits into a slot; turns right to tighten; has a plastic grip; comes in many small sizes
the axe|splitting firewood|has a wedge shaped blade; was made of stone long ago; is swung with two hands; can fell a tree; must be kept sharp
the shovel|digging a garden|has a broad curved blade; lifts soil and snow; is pushed down with the foot; has a long straight handle; moves coal and gravel
the ladder|reaching a roof|has steps called rungs; must lean at a safe angle; folds for storage; is used by window cleaners; should stand on level ground
the wrench|loosening bolts|grips a nut firmly; gives more turning force; is called a spanner in Britain; can have a movable jaw; is used by plumbers""",
    "instrument": """
the guitar|singing by a campfire|has six strings; is plucked or strummed; has frets along its neck; can be electric; is loved in Spain
the piano|learning to read music|has 88 keys; hides its strings in a case; was invented around 1700; has pedals for the feet; is very hard to carry
the violin|leading an orchestra|is held under the chin; is played with a bow; has four strings; is carved from spruce; made Stradivari famous
the drum|keeping the beat|is struck with sticks; has a skin stretched tight; is one of the oldest instruments; was used to send messages; leads marching soldiers
the flute|playing soft melodies|is blown across a hole; is often made of silver; has no reed; was once made of bone; sounds like a bird
the trumpet|playing fanfares|is made of brass; has three valves; is blown with buzzing lips; is loved in jazz; sounds bright and loud
the harp|calm dinner music|has 47 strings; is plucked with the fingers; stands taller than a child; is a symbol of Ireland; was played in ancient palaces
the accordion|playing folk dances|has bellows in the middle; is worn on two straps; pushes air past reeds; has buttons for chords; is heard in Paris cafes""",
    "sport": """
soccer|a big team|has eleven players a side; is played with the feet; has a world cup; lasts ninety minutes; lets the keeper use hands
basketball|tall players|has five players a side; has a hoop ten feet high; was invented by Naismith; is played by bouncing a ball; gives three points for long shots
tennis|training quick reflexes|is played with a racket; counts fifteen thirty forty; has a net across the court; can be played on clay; is famous at Wimbledon
swimming|tired joints|works nearly every muscle; has four main strokes; is done in pools and lakes; can save your life; is easier with goggles
cycling|getting to work|calls for a helmet; has a yellow jersey; keeps city air clean; uses gears on hills; makes the legs strong
skiing|a winter trip|starts high on a slope; uses two poles; began in Scandinavia; is taught with a snow plow; has jumps and races
golf|quiet long walks|has eighteen holes; uses many clubs; began in Scotland; is won with the fewest strokes; was once played on the moon
boxing|building courage|is fought in a ring; calls for padded gloves; is split into rounds; can end with a knockout; made Muhammad Ali famous""",
    "vehicle": """
the train|long land trips|runs on steel rails; stops at stations; pulls many wagons; first ran on steam; passes bridges and tunnels
the bus|cheap city travel|carries fifty people; follows a fixed route; can have two decks; takes children to school; saves space on the road
the bicycle|short healthy trips|has two wheels; makes no smoke; has a chain and a saddle; burns no fuel; can be parked anywhere
the airplane|crossing oceans quickly|has two long wings; was built by the Wright brothers; lands on a runway; flies above the clouds; is steered by pilots
the ship|moving huge loads|sails on the sea; is led by a captain; drops an anchor; waits in a harbor; is turned by a rudder
the helicopter|mountain rescue|has spinning blades on top; can hover in one place; can land without a runway; was drawn by Leonardo; balances with a tail rotor
the tractor|plowing fields|has huge rear wheels; pulls farm machines; burns diesel; moves slowly but strongly; took the place of oxen
the submarine|exploring under the sea|dives by filling tanks; looks around with a periscope; has a very strong hull; finds its way by sonar; can hide from radar""",
    "job": """
the doctor|curing sick people|studies medicine for years; listens to the heart; writes prescriptions; works in a hospital; keeps secrets of patients
the baker|fresh morning rolls|gets up before dawn; kneads dough; wears a white apron; works beside a hot oven; sells birthday cakes
the teacher|explaining hard ideas|works in a classroom; marks homework; writes on a board; helps pupils grow; plans every lesson
the farmer|growing food|works with the seasons; plants seeds in spring; brings in the harvest; watches the weather; rises with the rooster
the carpenter|building furniture|works with wood; measures twice before cutting; keeps a pencil handy; makes doors and tables; sands rough edges smooth
the astronaut|repairing a space station|floats without weight; wears a pressure suit; trains under water; passes sixteen sunrises a day; drinks recycled water
the firefighter|putting out flames|slides down a pole; wears a helmet and mask; rides a red engine; breaks doors to reach people; sprays water from hoses
the judge|settling a dispute|works in a court; wears a black robe; bangs a gavel; knows the law well; listens to both sides""",
}


@dataclass(frozen=True)
class Thing:
    """One thing of the world: ``written`` inside a sentence ("the saw"), bare ``name`` ("saw"), its use, its facts."""

    group: str
    written: str
    use: str
    facts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The written name without its article."""
        return self.written.removeprefix("the ")

    @property
    def capital(self) -> str:
        """The written name as it begins a sentence."""
        return self.written[0].upper() + self.written[1:]


def _read_table() -> tuple[Thing, ...]:
    things = []
    for group, rows in _TABLE.items():
        for row in rows.strip().splitlines():
            written, use, facts = row.split("|")
            things.append(Thing(group, written, use, tuple(fact.strip() for fact in facts.split(";"))))
    return tuple(things)


THINGS: tuple[Thing, ...] = _read_table()
