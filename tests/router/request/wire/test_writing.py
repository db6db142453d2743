"""What the native writer does once memory is short."""

import shlex
import subprocess
import sysconfig
from pathlib import Path

STORY = r"""
#include <assert.h>
#include <stdlib.h>
static int blocks_left = 1;
static void *short_of_memory(size_t size) { return blocks_left-- > 0 ? malloc(size) : NULL; }
#define malloc short_of_memory
#include "router/request/wire/native/wire.h"

int main(void) {
    static uint8_t bytes[5000];
    Backward b = {0};
    put_raw(&b, bytes, 4000);
    assert(!b.failed && written(&b) == 4000);
    put_raw(&b, bytes, 5000); /* there is no memory for it */
    assert(b.failed && written(&b) == 4000);
    blocks_left = 1; /* for what comes next there would be, but its message is broken by now */
    put_raw(&b, bytes, 1);
    put_raw(&b, bytes, 5000);
    assert(b.failed && written(&b) == 4000 && blocks_left == 1);
    free(b.bytes);
    return 0;
}
"""


def test_a_message_that_memory_was_short_for_stays_failed(tmp_path: Path) -> None:
    source, program = tmp_path / "story.c", tmp_path / "story"
    source.write_text(STORY)
    house = Path(__file__).parents[4]
    compiler = shlex.split(sysconfig.get_config_var("CC"))[0]
    subprocess.run([compiler, f"-I{house}", source, "-o", program], check=True)
    subprocess.run([program], check=True)
