"use strict";
/* Colours and dashes that tell curves apart, where none stands for a part of the TTFT. */
const HUES = ["network", "prefill", "decode", "queue", "gateway", "ink"], DASHES = [undefined, [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [1, 4]];
