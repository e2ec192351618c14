/*
 * What the JSON reader visits, and where it stops.
 */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/json_read.h"
#include "check.h"

static void note_object(void *context, const char *key)
{
    tddp_add_text(context, 512, "%s{ ", key);
}

static void note_scalar(void *context, const char *key, const char *text)
{
    tddp_add_text(context, 512, "%s=%s ", key, text);
}

static bool visit(const char *json, char seen[512])
{
    const tddp_json_visitor visitor = {seen, note_object, note_scalar};
    seen[0] = '\0';
    return tddp_json_read(json, strlen(json), &visitor);
}

static void expect(const char *json, bool whole, const char *expected)
{
    char seen[512];
    bool got = visit(json, seen);
    CHECK_TEXT(seen, expected);
    CHECK_INT(got, whole);
}

TEST(items_come_in_their_order)
{
    expect("{\"a\": 1, \"b\": {\"c\": [true, null, {\"d\": \"x\"}], \"e\": {}}, \"f\": []}", true,
           "{ a=1 b{ c=true c=null c{ d=x e{ ");
    expect(" \"alone\" ", true, "=alone ");
    expect("-1.5e3", true, "=-1.5e3 ");
    expect("[[1], [2, 3]]", true, "=1 =2 =3 ");
}

TEST(escapes_are_decoded)
{
    expect("\"\\\"\\\\\\/\\t\\u0041\\u00e4\\u20ac\\ud83d\\ude00\"", true,
           "=\"\\/\tA\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80 ");
    expect("\"\\u0000\\udc00\"", true, "=?? ");
    expect("\"\\x\"", false, "");
    expect("\"\\u12\"", false, "");
}

TEST(a_damaged_text_has_what_came_before)
{
    expect("", false, "");
    expect("{\"a\": 1, \"b\": \"cut", false, "{ a=1 ");
    expect("{\"a\": 1} x", false, "{ a=1 ");
    expect("{\"a\" 1}", false, "{ ");
    expect("[1, 2", false, "=1 =2 ");
    expect("{\"a\": abcdefghijklmnopqrstuvwxyzabcdefgh}", false, "{ ");
}

TEST(depth_is_bounded)
{
    char seen[512];
    char deep[200];
    memset(deep, '[', 100);
    memset(deep + 100, ']', 99);
    deep[199] = '\0';
    CHECK(!visit(deep, seen));
}
