-- name: set_hungry
UPDATE genba.node SET hungry = :hungry WHERE id = :id AND hungry <> :hungry;
