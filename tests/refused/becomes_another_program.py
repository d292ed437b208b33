"""Another program takes the place of the rank."""

import os

os.execvp("true", ["true"])
