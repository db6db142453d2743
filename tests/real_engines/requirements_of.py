"""Prints what a vLLM wheel requires, less the torch family. usage: requirements_of.py WHEEL"""

import email.parser
import re
import sys
import zipfile

TORCH_FAMILY = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
    metadata = email.parser.Parser().parsestr(wheel.read(name).decode())
for requirement in metadata.get_all("Requires-Dist", []):
    if "extra ==" not in requirement and not TORCH_FAMILY.match(requirement):
        sys.stdout.write(f"{requirement}\n")
