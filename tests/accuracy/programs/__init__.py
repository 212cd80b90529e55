"""What one_card.py runs beside torchvision's models: a function each, which takes a row of published.csv and returns a step."""

from tests.accuracy.programs import language, pictures, vectors

PROGRAMS = language.PROGRAMS | pictures.PROGRAMS | vectors.PROGRAMS  # by the table's column "model"
