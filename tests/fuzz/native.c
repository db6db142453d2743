/* The native readers on a copy of exactly the bytes given, so that AddressSanitizer sees a read of
 * one byte too many. Results of the readers that Python can't call go to `Seen`. */
#include "router/core/native/plain_request.h"
#include "router/wire/native/received.h"

typedef struct {
    int64_t plain, request_id, model, session_id, tokens, hashes; /* sizes; hashes and tokens too */
    int64_t block_size, prompt_tokens, output_tokens, priority, omit_receipt;
    int64_t items; /* of a batch */
} Seen;

enum { FIELDS = 1 << 20 };
static volatile uint64_t kept; /* so that no read is optimized away */

static void touch(Span span) {
    for (size_t i = 0; i < span.size; i++) kept += span.at[i];
}

static void *exact(size_t size) { return malloc(size ? size : 1); }

static void request_all(Span message) {
    Bounds most = {FIELDS, FIELDS, FIELDS};
    Received received;
    kept += (uint64_t)text_form(message, FIELDS);
    if (look_at_request(message, &most, &received)) return;
    if (received.form == TOKEN_BYTES || is_text((uint32_t)received.form)) {
        touch(received.tokens);
    } else if (received.form && received.form != ESTIMATED_TOKENS) {
        size_t size = received.elements * (received.form == BLOCK_HASHES ? 8 : 4);
        void *elements = exact(size);
        if (!copy_elements(&received, elements)) touch((Span){elements, size});
        free(elements);
    }
}

static int64_t batch_all(Span batch) {
    Span left = batch;
    Item item;
    int64_t items = count_items(batch, FIELDS, FIELDS);
    while (read_item(&left, &item) > 0) touch(item.request);
    OddItem odd;
    size_t fields = 0;
    for (left = batch; read_odd_item(&left, &fields, &odd) > 0;) {
        if (!odd.is_request) continue;
        uint8_t *request = exact(odd.request_bytes);
        copy_requests(&odd, request);
        touch((Span){request, odd.request_bytes});
        free(request);
    }
    size_t count;
    Span piece;
    if (!count_fields(batch, 1, FIELDS, FIELDS, &count))
        for (left = batch; next_bytes(&left, 1, &piece);) touch(piece);
    return items;
}

void read_all(const uint8_t *bytes, size_t size, Seen *seen) {
    uint8_t *copy = exact(size);
    if (size) memcpy(copy, bytes, size);
    Span message = {copy, size};
    PlainRequest plain;
    memset(seen, 0, sizeof *seen);
    request_all(message);
    seen->items = batch_all(message);
    seen->plain = read_plain(message, &plain);
    if (seen->plain) {
        touch(plain.request_id), touch(plain.model), touch(plain.session_id);
        touch(plain.tokens), touch(plain.hashes);
        seen->request_id = (int64_t)plain.request_id.size;
        seen->model = (int64_t)plain.model.size;
        seen->session_id = (int64_t)plain.session_id.size;
        seen->tokens = (int64_t)plain.tokens.size;
        seen->hashes = (int64_t)plain.hashes.size;
        seen->block_size = plain.hashes_block_size;
        seen->prompt_tokens = (int64_t)plain.prompt_tokens;
        seen->output_tokens = plain.output_tokens;
        seen->priority = plain.priority;
        seen->omit_receipt = plain.omit_receipt;
    }
    free(copy);
}
