"""python run_recipe.py METHOD PLACE RECIPE ARGUMENTS ...: see `recipes.py`."""

import sys

from tests.process import recipes

if __name__ == "__main__":
    sys.exit(recipes.main(*sys.argv[1:]))
