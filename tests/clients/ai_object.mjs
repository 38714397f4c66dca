import assert from "node:assert";
import { openai } from "@ai-sdk/openai";
import { generateObject } from "ai";
import { z } from "zod";

const model = process.argv[2];
for (const chosen of [openai(model), openai.chat(model)]) {
  const { object } = await generateObject({
    model: chosen,
    schema: z.object({ name: z.string(), country: z.string() }),
    maxOutputTokens: 128,
    prompt: "Name a city.",
  });
  assert.equal(typeof object.name, "string");
  assert.equal(typeof object.country, "string");
}
